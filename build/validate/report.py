"""What a validation found: a fault names the place, what is wrong and what to do; a report is shown or written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
_SHOWN = 20  # faults of a stage shown on a terminal; JSON and JUnit have all


@dataclass(frozen=True)
class Fault:
    """where: a layer's module path, a tensor, a field. advice: what to do."""

    where: str
    message: str
    advice: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message} {self.advice}".strip()


@dataclass(frozen=True)
class Outcome:
    """One stage. facts: what was checked, with numbers. why: of a stage that was not run."""

    stage: str
    title: str
    seconds: float = 0.0
    facts: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    why: str = ""

    @property
    def status(self) -> str:
        """passed, failed or not run."""
        return NOT_RUN if self.why else FAILED if self.faults else PASSED


@dataclass(frozen=True)
class Report:
    """subject: what was validated, by name (source, target, ranks, ...)."""

    subject: dict[str, Any]
    outcomes: tuple[Outcome, ...]

    @property
    def ok(self) -> bool:
        """True when no stage failed."""
        return not any(outcome.faults for outcome in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists."""
        stages = [asdict(one) | {"status": one.status, "seconds": round(one.seconds, 2)} for one in self.outcomes]
        return {"ok": self.ok, "subject": self.subject, "stages": stages}

    def junit(self) -> bytes:
        """JUnit XML: a test case a stage."""
        suite = ElementTree.Element("testsuite", name="glmspec validate")
        suite.set("tests", str(len(self.outcomes)))
        suite.set("failures", str(sum(one.status == FAILED for one in self.outcomes)))
        suite.set("skipped", str(sum(one.status == NOT_RUN for one in self.outcomes)))
        suite.set("time", f"{sum(one.seconds for one in self.outcomes):.2f}")
        properties = ElementTree.SubElement(suite, "properties")
        for name, value in self.subject.items():
            ElementTree.SubElement(properties, "property", name=name, value=_xml(value))
        for one in self.outcomes:
            case = ElementTree.SubElement(suite, "testcase", classname="glmspec.validate", name=one.stage)
            case.set("time", f"{one.seconds:.2f}")
            if one.why:
                ElementTree.SubElement(case, "skipped", message=_xml(one.why))
            if one.faults:
                failure = ElementTree.SubElement(case, "failure", message=_xml(one.faults[0]))
                failure.text = _xml("\n".join(map(str, one.faults)))
            ElementTree.SubElement(case, "system-out").text = _xml("\n".join(one.facts))
        ElementTree.indent(suite)
        return ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True) + b"\n"

    def show(self, console: Console) -> None:
        """The table, then the faults in full."""
        title = ", ".join(f"{key} {value}" for key, value in self.subject.items())
        table = Table(title=f"Validation: {title}", title_justify="left")
        for column, justify in (("stage", "left"), ("result", "left"), ("seconds", "right"), ("checked", "left")):
            table.add_column(column, justify=justify, overflow="fold", no_wrap=column == "stage")
        for one in self.outcomes:
            colour = {PASSED: "green", FAILED: "red", NOT_RUN: "yellow"}[one.status]
            told = one.why or "\n".join(one.facts) or one.title
            table.add_row(one.stage, f"[{colour}]{one.status}[/{colour}]", f"{one.seconds:.1f}", _plain(told))
        console.print(table)
        for one in self.outcomes:
            for fault in one.faults[:_SHOWN]:
                console.print(f"{one.stage}: {fault}", markup=False, highlight=False, soft_wrap=True)
            if len(one.faults) > _SHOWN:
                console.print(f"{one.stage}: and {len(one.faults) - _SHOWN} more (see --json)")


def listed(names: Iterable[str], most: int = 3) -> str:
    """A few names, and how many more."""
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def _xml(value: Any) -> str:
    """Text without the characters that XML 1.0 has no place for."""
    return "".join(character for character in str(value) if character >= " " or character in "\t\n")
