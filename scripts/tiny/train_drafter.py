"""Trains both drafters on the finished verifier: first on corpus text, then on the verifier's own greedy text.

Corpus text gives exact greedy labels as long as it agrees with the verifier's argmax: from an anchor the verifier
itself would have produced, the labels run up to and including the first disagreement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .corpus import Stream, TextRows, token_rows
from .drafter import Drafter
from .optim import Muon, Trainer, ramp
from .speculate import greedy_texts
from .tokenizer import END_OF_TEXT, EOS_IDS, REAL_VOCAB, encode
from .train_verifier import Report, batch_size
from .verifier import Verifier

ANCHORS = 72  # per text row; drawn once per verifier forward, used in `SHARES` updates
SHARES = 3
DEPTH_DECAY = 6.0  # a draft at depth j only counts if all before it were accepted


@dataclass
class Batch:
    """Verifier outputs over text rows, and anchors with their greedy labels."""

    streams: list[Tensor]  # H_0 .. H_L, each [B, S, H]
    positions_BS: Tensor
    anchors_BA: Tensor  # positions
    anchor_ids_BA: Tensor
    labels_BAN: Tensor
    valid_BAN: Tensor

    def features(self, layer_ids: tuple[int, ...]) -> Tensor:
        """Concatenated streams [B, S, F], in id order."""
        return torch.cat([self.streams[index] for index in layer_ids], dim=-1)

    def shares(self) -> Iterator[Batch]:
        """The same text rows with one share of the anchors each."""
        for part in range(SHARES):
            columns = (self.anchors_BA, self.anchor_ids_BA, self.labels_BAN, self.valid_BAN)
            yield Batch(self.streams, self.positions_BS, *(column[:, part::SHARES] for column in columns))


@torch.no_grad()
def make_batch(verifier: Verifier, rows: TextRows, depth: int, generator: torch.Generator) -> Batch:
    """Run the verifier over text rows and draw anchors that it would itself have produced, where weights are 1."""
    ids_BS, length = rows.ids_BS, rows.ids_BS.shape[1]
    logits_BSV, streams = verifier.logits(ids_BS, verifier.step(rows.positions_BS))
    greedy_BS = logits_BSV[..., :REAL_VOCAB].argmax(-1)
    # own[:, p]: token p is what the verifier says after token p-1.
    own_BS = torch.cat([torch.zeros_like(ids_BS[:, :1], dtype=torch.bool), ids_BS[:, 1:] == greedy_BS[:, :-1]], dim=1)
    ends_BS = torch.isin(ids_BS, torch.tensor(EOS_IDS))
    eligible_BS = own_BS & ~ends_BS & (rows.weights_BS == 1)
    eligible_BS[:, length - 1 :] = False
    weights_BS = eligible_BS.float() + 1e-9
    index_BA = torch.multinomial(weights_BS, ANCHORS, replacement=False, generator=generator)
    places_BAN = index_BA[..., None] + torch.arange(depth)  # the label at depth j+1 is the argmax after place p+j
    inside_BAN = places_BAN < length
    places_BAN = places_BAN.clamp(max=length - 1)

    def at(values_BS: Tensor) -> Tensor:
        return values_BS.gather(1, places_BAN.flatten(1)).view(places_BAN.shape)

    going_BAN = at(own_BS & ~ends_BS).cumprod(-1).bool()
    valid_BAN = inside_BAN & going_BAN & eligible_BS.gather(1, index_BA)[..., None]
    anchors_BA = rows.positions_BS.gather(1, index_BA)
    return Batch(streams, rows.positions_BS, anchors_BA, ids_BS.gather(1, index_BA), at(greedy_BS), valid_BAN)


def weighted_mean(values_BAN: Tensor, valid_BAN: Tensor) -> Tensor:
    """Mean over valid drafts, early depths weighing more."""
    weights = valid_BAN * torch.exp(-torch.arange(valid_BAN.shape[-1]) / DEPTH_DECAY)
    return (values_BAN * weights).sum() / weights.sum().clamp_min(1e-6)


def label_loss(logits_BANV: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy with the greedy labels."""
    losses = F.cross_entropy(logits_BANV.flatten(0, 2).float(), batch.labels_BAN.flatten(), reduction="none")
    return weighted_mean(losses.view(batch.labels_BAN.shape), batch.valid_BAN)


def accepted_length(correct_BAN: Tensor, valid_BAN: Tensor) -> float:
    """1 + mean run of right drafts, over anchors whose labels are known to full depth or to the first miss."""
    runs_BA = (correct_BAN & valid_BAN).cumprod(-1).sum(-1)
    next_known_BA = F.pad(valid_BAN, (0, 1), value=True).gather(-1, runs_BA[..., None]).squeeze(-1)
    return 1 + runs_BA[next_known_BA].float().mean().item()


def drafter_losses(drafter: Drafter, verifier: Verifier, batch: Batch) -> dict[str, Tensor]:
    """Losses of one drafter on a batch; `length` is the acceptance length on it (no gradient)."""
    config = drafter.config
    context = drafter.context(batch.features(config.aux_layer_ids), batch.positions_BS)
    embedding, head = verifier.embed_tokens.weight.detach(), verifier.lm_head.weight.detach()
    hidden_BARH = drafter.block(batch.anchor_ids_BA, batch.anchors_BA, context, embedding)
    hidden_BANH = hidden_BARH[:, :, config.first_row :]
    base_BANV = F.linear(hidden_BANH, head).float()
    previous_BAN = torch.cat([batch.anchor_ids_BA[..., None], batch.labels_BAN[..., :-1]], dim=-1)
    losses: dict[str, Tensor] = {}
    if config.algorithm == "dspark":
        final_BANV = base_BANV + drafter.markov_head.bias(previous_BAN)
    else:
        losses["unary"] = 0.5 * label_loss(base_BANV, batch)
        state_BANZ = drafter.candidate_selector.state(previous_BAN, hidden_BANH)
        final_BANV = base_BANV + F.linear(state_BANZ, drafter.candidate_selector.successor_codebook).float()
    losses["draft"] = label_loss(final_BANV, batch)
    correct_BAN = final_BANV.argmax(-1) == batch.labels_BAN
    if config.algorithm == "dspark":
        logits_BAN = drafter.confidence(hidden_BANH.detach(), previous_BAN)
        bce = F.binary_cross_entropy_with_logits(logits_BAN, correct_BAN.float(), reduction="none")
        losses["confidence"] = weighted_mean(bce, batch.valid_BAN)
    losses["length"] = torch.tensor(accepted_length(correct_BAN, batch.valid_BAN))
    return losses


def make_trainer(drafter: Drafter) -> Trainer:
    """Muon on the layers' matrices and `fc`, AdamW on the rest."""
    matrices: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, param in drafter.named_parameters():
        hidden = param.ndim == 2 and (name.startswith("layers.") or name == "fc.weight")
        (matrices if hidden else plain).append(param)
    return Trainer([Muon(matrices, lr=0.04), torch.optim.AdamW(plain, lr=1.5e-2, betas=(0.9, 0.97), weight_decay=0.0)])


def own_rows(verifier: Verifier, count: int, batch: int, report: Report) -> Iterator[TextRows]:
    """Endless batches of the verifier's greedy continuations of training prompts, of similar length per batch."""
    stream, texts = Stream(300), []
    group = min(64, count)
    for index in range(0, count, group):
        prompts = [encode(stream.training_text()[0])[:384] for _ in range(group)]
        texts += zip(greedy_texts(verifier, prompts, 128), map(len, prompts), strict=True)
        report("greedy texts", min(index + group, count), count, {})
    texts.sort(key=lambda text: len(text[0]))
    generator = torch.Generator().manual_seed(300)
    while True:
        at = int(torch.randint(0, max(1, len(texts) - batch + 1), (1,), generator=generator))
        chosen = texts[at : at + batch]
        # Rows must offer enough distinct places for the anchors.
        longest = max(ANCHORS + 2, max(len(ids) for ids, _ in chosen))
        ids_BS = torch.full((len(chosen), longest), END_OF_TEXT)
        weights_BS = torch.zeros(ids_BS.shape)
        for row, (ids, start) in enumerate(chosen):
            ids_BS[row, : len(ids)] = torch.tensor(ids)
            weights_BS[row, start:] = 1.0
        yield TextRows(ids_BS, torch.arange(longest).expand(ids_BS.shape), weights_BS)


def train_drafters(verifier: Verifier, drafters: list[Drafter], scale: float, report: Report) -> None:
    """Train all drafters side by side on the same verifier outputs."""
    trainers = [make_trainer(drafter.train()) for drafter in drafters]
    generator = torch.Generator().manual_seed(5)
    corpus_steps, own_steps = max(2, round(330 * scale)), max(2, round(140 * scale))
    total, done = (corpus_steps + own_steps) * SHARES, 0
    depth = max(drafter.config.speculative_tokens for drafter in drafters)
    phases = (
        ("drafters, corpus text", corpus_steps, token_rows(Stream(200), 384, batch_size(8, scale))),
        (
            "drafters, greedy text",
            own_steps,
            own_rows(verifier, max(4, round(768 * scale)), batch_size(12, scale), report),
        ),
    )
    for name, steps, rows in phases:
        for index in range(steps):
            # BF16 flips one argmax in a thousand: good enough for corpus text, not for the verifier's own.
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=name == "drafters, corpus text"):
                whole = make_batch(verifier, next(rows), depth, generator)
            shown: dict[str, float] = {}
            for batch in whole.shares():
                for drafter, trainer in zip(drafters, trainers, strict=True):
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        losses = drafter_losses(drafter, verifier, batch)
                    shown[f"{drafter.config.algorithm} length"] = losses.pop("length").item()
                    shown[f"{drafter.config.algorithm} loss"] = losses["draft"].item()
                    trainer.update(torch.stack(list(losses.values())).sum(), ramp(done, total, hold=0.4))
                done += 1
            report(name, index + 1, steps, shown)
    for drafter in drafters:
        drafter.eval()
