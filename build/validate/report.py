"""What a validation found: a fault names the place, what is wrong and what to do; a report is shown or written."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from glmspec.core.errors import GlmspecError

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


def fault_of(error: GlmspecError) -> Fault:
    """An error that names its place first, as ours do."""
    where, _, message = str(error).partition(": ")
    return Fault(where, message, "") if message else Fault("validate", where, "")


@dataclass(frozen=True)
class Outcome:
    """One stage. facts: what was checked, in words; numbers: by name. why: of a stage that was not run; missing:
    because this machine lacks something."""

    stage: str
    title: str
    seconds: float = 0.0
    facts: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    numbers: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    missing: bool = False

    @property
    def status(self) -> str:
        """passed, failed or not run."""
        return NOT_RUN if self.why else FAILED if self.faults else PASSED


@dataclass(frozen=True)
class Report:
    """subject: what was validated, by name (source, target, ranks, ...)."""

    subject: dict[str, Any]
    outcomes: tuple[Outcome, ...]
    versions: dict[str, str | None] = field(default_factory=dict)  # of the packages that were asked, None: not there

    @property
    def ok(self) -> bool:
        """True when no stage failed."""
        return not any(outcome.faults for outcome in self.outcomes)

    @property
    def exit_code(self) -> int:
        """0: all passed. 1: a stage failed. 3: none did, and this machine lacks what a stage needs."""
        return 1 if not self.ok else 3 if any(outcome.missing for outcome in self.outcomes) else 0

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists."""
        stages = [
            asdict(outcome) | {"status": outcome.status, "seconds": round(outcome.seconds, 2)}
            for outcome in self.outcomes
        ]
        seconds = round(sum(outcome.seconds for outcome in self.outcomes), 2)
        about = {"ok": self.ok, "seconds": seconds, "versions": self.versions, "subject": self.subject}
        return about | {"stages": stages}

    def junit(self) -> bytes:
        """JUnit XML: a test case a stage."""
        about = " ".join(str(self.subject[key]) for key in ("target", "tp", "weights") if key in self.subject)
        suite = ElementTree.Element("testsuite", name=f"glmspec validate {about}".strip(), errors="0")
        suite.set("tests", str(len(self.outcomes)))
        suite.set("failures", str(sum(outcome.status == FAILED for outcome in self.outcomes)))
        suite.set("skipped", str(sum(outcome.status == NOT_RUN for outcome in self.outcomes)))
        suite.set("time", f"{sum(outcome.seconds for outcome in self.outcomes):.2f}")
        properties = ElementTree.SubElement(suite, "properties")
        for name, value in self.subject.items():
            ElementTree.SubElement(properties, "property", name=name, value=_xml(value))
        for outcome in self.outcomes:
            case = ElementTree.SubElement(suite, "testcase", classname="glmspec.validate", name=outcome.stage)
            case.set("time", f"{outcome.seconds:.2f}")
            if outcome.why:
                ElementTree.SubElement(case, "skipped", message=_xml(outcome.why))
            if outcome.faults:
                first = _xml(outcome.faults[0]).splitlines()[0]
                failure = ElementTree.SubElement(case, "failure", type="fault", message=first)
                failure.text = _xml("\n".join(map(str, outcome.faults)))
            if outcome.facts:
                ElementTree.SubElement(case, "system-out").text = _xml("\n".join(outcome.facts))
        ElementTree.indent(suite)
        return ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True) + b"\n"

    def show(self, console: Console) -> None:
        """The table, then the faults in full."""
        title = ", ".join(f"{key} {value}" for key, value in self.subject.items())
        table = Table(title=escape(f"Validation: {title}"), title_justify="left")
        for column in ("stage", "result", "seconds", "checked"):
            right = column == "seconds"
            table.add_column(column, justify="right" if right else "left", overflow="fold", no_wrap=column == "stage")
        for outcome in self.outcomes:
            colour = {PASSED: "green", FAILED: "red", NOT_RUN: "yellow"}[outcome.status]
            checked = (
                outcome.why
                or "\n".join(outcome.facts)
                or (f"faults: {len(outcome.faults)}, below" if outcome.faults else outcome.title)
            )
            table.add_row(
                outcome.stage, f"[{colour}]{outcome.status}[/{colour}]", f"{outcome.seconds:.1f}", escape(checked)
            )
        console.print(table)
        for outcome in self.outcomes:
            for fault in outcome.faults[:_SHOWN]:
                console.print(f"{outcome.stage}: {fault}", markup=False, highlight=False, soft_wrap=True)
            if len(outcome.faults) > _SHOWN:
                console.print(f"{outcome.stage}: and {len(outcome.faults) - _SHOWN} more (see --json)")
        count = {
            status: sum(outcome.status == status for outcome in self.outcomes) for status in (PASSED, FAILED, NOT_RUN)
        }
        seconds = sum(outcome.seconds for outcome in self.outcomes)
        console.print(", ".join(f"{n} {status}" for status, n in count.items() if n) + f", {seconds:.0f} s")


def _xml(value: Any) -> str:
    """Text without the characters that XML 1.0 has no place for."""
    return "".join(character for character in str(value) if character >= " " or character in "\t\n")
