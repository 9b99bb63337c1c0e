"""The MTP module as a drafter: lossless, drafts are those of the module as trained, caches those of a cold start."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from support.models import ASSETS, GOLDENS, LIMITS, edit_checkpoint, mtp_tensors
from support.mtp import OracleChain, hiddens, load_oracle

from glmspec.build.engine import build_engines
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.convert.conversion import plan_conversion
from glmspec.core.errors import EngineError
from glmspec.core.progress import Progress
from glmspec.models.acceptance import DraftProbs, Rejection
from glmspec.models.mtp import Mtp
from glmspec.network.config import NetworkConfig
from glmspec.plugins import draw
from glmspec.runtime.accept import Acceptance
from glmspec.runtime.engine import Engine
from glmspec.runtime.generate import answer_all
from glmspec.runtime.model import Model
from glmspec.runtime.noise import Noise
from glmspec.runtime.propose import Drafts, KeptRows
from glmspec.runtime.propose_mtp import MtpDrafter
from glmspec.runtime.request import Request
from glmspec.runtime.sampling import Sampling
from glmspec.runtime.text import Tokenizer

VERIFIER = ASSETS / "tiny-verifier"
TOPK, PAGE = 48, 16  # of the tiny verifier, of the cpu target
NEW_TOKENS = 40
TEXT = replace(LIMITS, max_num_batched_tokens=256)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Held-out texts."""
    lines = [json.loads(line)["prompt"] for line in (ASSETS / "prompts.jsonl").read_text().splitlines()]
    return [Tokenizer(VERIFIER).encode(text) for text in lines]


class Notes(Progress):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(scope="module")
def notes() -> Notes:
    return Notes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, notes):
    """The trained verifier with its module and no other drafter. Steps so small that prompts come in chunks."""
    out = tmp_path_factory.mktemp("mtp") / "engines"
    options = BuildOptions(mtp=True, max_model_len=256, max_num_seqs=5, max_num_batched_tokens=64)
    build_engines(VERIFIER, (), TARGETS["cpu"], options, out, notes, check=False)
    return out


@pytest.fixture(scope="module")
def requests(texts) -> list[Request]:
    """Whole prompts, and prompts that end around a page's end and around index_topk."""
    text = [token for one in texts[20:26] for token in one]
    ends = [1, 2, *(edge + by for edge in (PAGE, TOPK, 6 * PAGE) for by in (-1, 0, 1))]
    prompts = [*texts[:5], *(text[:end] for end in ends)]
    return [Request(prompt_ids=tuple(one), max_tokens=NEW_TOKENS) for one in prompts]


@pytest.fixture(scope="module")
def plain(folder, requests) -> list[list[int]]:
    """Decoding without drafts."""
    return tokens_of(Engine(folder, speculate=False), requests)


def tokens_of(engine: Engine, requests: list[Request]) -> list[list[int]]:
    return [job.answer.tokens for job in answer_all(engine, requests)]


# -- lossless -----------------------------------------------------------------------------------------


def test_it_is_the_directory_s_drafter(folder, notes):
    engine = Engine(folder)
    directory = engine.directory
    assert engine.drafter_name == directory.choose_drafter("mtp") == "mtp"
    assert engine.drafter.num_drafts == 3 and engine.limits.block_rows == 4
    assert directory.model("mtp")["build_config"]["num_drafts"] == 3
    assert any("index_share_for_mtp_iteration" in note for note in notes.said)  # read, and not done
    directory.record["drafters"] = [{"name": "dspark", "kind": "dspark", "source": "ck"}]  # as if there were one
    assert [directory.choose_drafter(name) for name in (None, "mtp", "ck")] == ["dspark", "mtp", "dspark"]
    with pytest.raises(EngineError, match=r"It has: dspark, mtp\.$"):
        directory.choose_drafter("eagle")


def test_alone_and_in_company_the_answers_are_plain_greedy(folder, requests, plain):
    engine = Engine(folder)
    assert [engine.answer(request)[0].tokens for request in requests[::3]] == plain[::3]
    assert tokens_of(engine, requests) == plain
    some = [replace(one, speculate=at % 2 == 0) for at, one in enumerate(requests)]
    assert tokens_of(engine, some) == plain


def test_most_drafts_stand(folder, texts):
    """By the training code 3.64 tokens a step over all prompts."""
    engine = Engine(folder)
    answer_all(engine, [Request(prompt_ids=tuple(one), max_tokens=NEW_TOKENS) for one in texts[30:40]])
    assert engine.stats.mean_acceptance_length > 3.3
    first, second, third = engine.stats.position_rates
    assert first > 0.9 and first >= second >= third > 0.5


def test_a_random_module_is_nearly_always_wrong_and_changes_nothing(tmp_path):
    golden = GOLDENS / "checkpoints" / "verifier"
    module = mtp_tensors(load_file(golden / "model.safetensors"), like=2, layer=6)
    verifier = edit_checkpoint(golden, tmp_path / "hf", config={"num_nextn_predict_layers": 1}, add=module)
    options = BuildOptions(mtp=True, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64)
    build_engines(verifier, (), TARGETS["cpu"], options, tmp_path / "e", Progress(), check=False)
    generator = random.Random(5)
    requests = [
        Request(prompt_ids=tuple(generator.randrange(2, 95) for _ in range(length)), max_tokens=20)
        for length in (1, 2, 15, 16, 17, 31, 32, 33, 90)
    ]
    engine = Engine(tmp_path / "e")
    assert tokens_of(engine, requests) == tokens_of(Engine(tmp_path / "e", speculate=False), requests)
    assert engine.stats.num_draft_tokens > 300 and engine.stats.draft_acceptance_rate < 0.1


def test_its_caches_are_those_of_a_cold_start(folder, requests, plain):
    """Rows of drafts are written over by those of the tokens that stood: none is lost, doubled, shifted or left."""
    rows = {}
    request, answer = requests[3], plain[3]
    for name, company in (("warm", requests[4:7]), ("cold", [])):
        engine = Engine(folder)
        for other in company:  # before it in every packed step
            engine.add(other)
        if name == "cold":
            request = Request(prompt_ids=request.prompt_ids + tuple(answer), max_tokens=3, ignore_eos=True)
        sequence = engine.add(request)
        engine.step()
        pages = list(sequence.pages)
        while engine.busy:
            engine.step()
        count = len(requests[3].prompt_ids) + len(answer) - 1 - engine.limits.block_rows  # the last are never appended
        rows[name] = {
            cache: tensor[pages].transpose(1, 2).flatten(0, 1)[:count]
            for cache, tensor in engine.drafter.model.caches[0].items()
        }
    assert count > len(requests[3].prompt_ids) + 20
    for cache, expected in rows["cold"].items():
        torch.testing.assert_close(rows["warm"][cache], expected, rtol=1e-3, atol=1e-3, msg=cache)


# -- a step by itself, against the module as trained -----------------------------------------------------


@dataclass(eq=False)
class DraftedSequence:
    """A sequence as far as a drafter looks at it. text: all that it will be; known: how many of its tokens are."""

    name: str
    text: list[int]
    states: torch.Tensor
    pages: list[int]
    chain: OracleChain
    temperature: float
    known: int = 0

    def __post_init__(self) -> None:
        self.request = SimpleNamespace(sampling=Sampling(temperature=self.temperature))
        self.noise = Noise(len(self.name) + 7)
        self.ring: list[int] = []

    @property
    def tokens(self) -> list[int]:
        return self.text[: self.known]


@pytest.fixture(scope="module")
def oracle():
    return load_oracle()


@pytest.fixture
def running(oracle, texts) -> list[DraftedSequence]:
    """Two that decode and one in its prompt."""
    made = []
    for at, (name, temperature) in enumerate((("a", 0.0), ("bb", 4.0), ("ccc", 2.5))):
        text = [token for one in texts[40 + 5 * at : 45 + 5 * at] for token in one][:90]
        pages = list(range(2 + at, 38, 3))
        made.append(DraftedSequence(name, text, hiddens(oracle, text), pages, OracleChain(oracle), temperature))
    return made


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[bool, Model]:
    """Without and with `q`."""
    checkpoint = plan_conversion(VERIFIER).write(tmp_path_factory.mktemp("module") / "ck")
    config, net_config = checkpoint.config, checkpoint.net_config("float32")
    trees = {sampled: Mtp(config, sampled=sampled) for sampled in (False, True)}
    return {
        sampled: Model(tree, TEXT, net_config, [checkpoint.tensors(0)], regions=sampled)
        for sampled, tree in trees.items()
    }


Step = list[tuple[DraftedSequence, int, int]]  # sequence, first position, rows kept


def propose(drafter: MtpDrafter, step: Step, wanted: list[DraftedSequence]) -> Drafts:
    """One step; before every kept run of rows lie two that were not."""
    junk, kept, parts, row = torch.full((2, step[0][0].states.shape[1]), 50.0), [], [], 0
    for sequence, start, count in step:
        kept.append(KeptRows(sequence, row + 2, start, count))
        parts += [junk, sequence.states[start : start + count]]
        row += 2 + count
    return drafter.propose({"hidden": torch.cat(parts)}, kept, wanted)


def expected(
    step: Step, wanted: list[DraftedSequence], ids: list[list[int]]
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Place in the batch, draft and logits of the module as trained, on the drafts that were made."""
    for sequence, start, count in step:
        following = sequence.text[start + 1 : start + count + 1]
        out = sequence.chain.run(start, following, sequence.states[start : start + count])
        if sequence not in wanted:
            continue
        place = wanted.index(sequence)
        for draft, token in enumerate(ids[place]):
            yield place, draft, out["logits"][-1]
            out = sequence.chain.run(start + count + draft, [token], out["draft_hidden"][-1:])


@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_margins_and_laws_are_the_module_s(models, running, sampled):
    a, b, c = running
    drafter = MtpDrafter(models[sampled], TEXT, 3)
    a.known, b.known, c.known = 48, 62, 90  # a is about to pass index_topk, b has
    steps = [
        ([(c, 0, 30), (b, 0, 61), (a, 0, 47)], [a, b]),
        ([(a, 47, 3), (c, 30, 40), (b, 61, 1)], [b, a]),
        ([(b, 62, 4), (a, 50, 1), (c, 70, 19)], [a, b, c]),
        ([(a, 51, 2), (b, 66, 2)], [b, a]),
    ]
    for step, wanted in steps:
        for sequence, start, count in step:
            if sequence in wanted:
                sequence.known = start + count + 1
        found = propose(drafter, step, wanted)
        assert [len(one) for one in found.ids] == [3] * len(wanted)
        assert found.signal.shape == (len(wanted), 3) and ("q" in found.probs) == sampled
        for place, draft, logits in expected(step, wanted, found.ids):
            best = logits.topk(2).values
            assert found.signal[place, draft].item() == pytest.approx((best[0] - best[1]).item(), abs=2e-3)
            temperature, chosen = wanted[place].temperature if sampled else 0.0, found.ids[place][draft]
            if not temperature:
                assert chosen == logits.argmax()
            if not sampled:
                continue
            probs = found.probs["q"][found.q_rows(place, 3)[draft]]
            if temperature:
                torch.testing.assert_close(
                    probs.double(), (logits.double() / temperature).softmax(0), rtol=1e-2, atol=1e-4
                )
                numbers, _, _ = wanted[place].noise.block(wanted[place].known - 1, 3)
                assert chosen == draw.reference(probs[None], torch.tensor(numbers[draft : draft + 1])).item()
            else:
                assert probs[chosen] == probs.sum() == 1


def test_the_law_of_small_and_large_temperatures(models, running):
    """In float64, over every row at once; 0 is the lowest argmax."""
    a = running[0]
    temperature_R = torch.tensor([0.0, 1e-4, 0.3, 1.0, 20.0])
    model, rows = models[True], len(temperature_R)
    seen = {}
    run = model.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "run", lambda inputs: seen.setdefault("in", inputs) and run(inputs))
        a.known = 31
        propose(MtpDrafter(model, TEXT, 1), [(a, 0, 30)], [a])
    again = {"logit_rows": torch.arange(rows, dtype=torch.int32), "draft_temperature": temperature_R}
    out = run(seen["in"] | again | {"draft_uniform": torch.full((rows,), 1 - 2**-23)})
    logits_RV = out["logits"].double()
    for row, temperature in enumerate(temperature_R.tolist()):
        one_hot = torch.nn.functional.one_hot(logits_RV[row].argmax(), logits_RV.shape[1]).double()
        probs = (logits_RV[row] / temperature).softmax(0) if temperature else one_hot
        torch.testing.assert_close(out["q"][row].double(), probs, rtol=1e-4, atol=1e-6)


def test_drafts_that_no_answer_can_hold_stay_in_the_sequence_s_pages(models, running):
    """The last page is full before the chain ends: nobody else's rows change, and the drafts within are right."""
    a = running[0]
    a.pages, a.known = a.pages[:4], 30
    drafter = MtpDrafter(models[False], TEXT, 8)
    others = [page for page in range(TEXT.num_pages) if page not in a.pages]
    before = {name: cache[others].clone() for name, cache in drafter.model.caches[0].items()}
    found = propose(drafter, [(a, 0, 29)], [a])
    for _, draft, logits in expected([(a, 0, 29)], [a], found.ids):
        if draft < 32 - 29:  # rows of the pages beyond those kept, and the first draft's
            assert found.ids[0][draft] == logits.argmax()
    assert all(torch.equal(cache[others], before[name]) for name, cache in drafter.model.caches[0].items())


# -- drawn drafts, end to end -------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["standard", "block"])
def test_drawn_drafts_beside_greedy_ones(folder, requests, plain, method):
    """Requests at temperature 0 answer as ever; the others are drawn, and accepted by their law."""
    engine = Engine(folder)
    config = engine.verifier.config
    weights = engine.drafter.model.weights[0] | engine.verifier.weights[0]
    net_config = NetworkConfig(compute="float32")
    tree = Rejection(config, DraftProbs(config.vocab_size, False))
    networks = {name: engine._load_acceptance(name) for name in engine.directory.acceptance}
    networks["reject"] = Model(tree, engine.limits, net_config, [{}])
    module = Model(Mtp(config, sampled=True), engine.limits, net_config, [weights])
    engine.drafter = engine.loop.drafter = MtpDrafter(module, engine.limits, 3)
    engine.loop.acceptance = Acceptance(networks, engine.limits, method)
    hot = Sampling(temperature=0.5, seed=3)
    mixed = [replace(one, sampling=hot) if at % 2 else one for at, one in enumerate(requests)]
    jobs = answer_all(engine, mixed)
    assert [job.answer.tokens for job in jobs][::2] == plain[::2]
    assert [job.answer.tokens for job in jobs][1::2] != plain[1::2]
    accepted = sum(job.stats.num_accepted for job in jobs[1::2]) / sum(job.stats.num_steps for job in jobs[1::2])
    assert accepted > 1.5
