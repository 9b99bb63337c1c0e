"""The verifier's sizes and its attention: multi-head latent attention over the selection of a DSA indexer.

Shape suffixes: B rows, S query positions, T key positions, H hidden, N heads, D head size, L latent (MLA),
K selected keys, X anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .tokenizer import PADDED_VOCAB


@dataclass(frozen=True)
class VerifierConfig:
    """Sizes of the verifier, under the names of the Hugging Face config."""

    vocab_size: int = PADDED_VOCAB
    hidden_size: int = 128
    intermediate_size: int = 384
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 7
    first_k_dense_replace: int = 2
    num_attention_heads: int = 4
    q_lora_rank: int = 64
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    routed_scaling_factor: float = 2.5
    index_topk: int = 48
    index_n_heads: int = 4
    index_head_dim: int = 32
    indexer_types: tuple[str, ...] = ("full", "full", "full", "shared", "shared", "full", "shared")
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """Normed input."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer without bias, scaled to keep variance."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


def interleaved_rope(x_BSND: Tensor, cos_BSD: Tensor, sin_BSD: Tensor) -> Tensor:
    """Rotate the pairs (0,1), (2,3), ...; the result lists first and second elements apart, which dots ignore."""
    even, odd = x_BSND[..., 0::2], x_BSND[..., 1::2]
    cos, sin = cos_BSD.unsqueeze(2), sin_BSD.unsqueeze(2)
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)


@dataclass
class Cache:
    """Latents and indexer keys per layer. Rows are written at their position, so rejected rows are overwritten."""

    latent_BTL: list[Tensor]
    index_BTD: list[Tensor]

    @classmethod
    def empty(cls, config: VerifierConfig, batch: int, length: int) -> Cache:
        """A cache of zeros for `batch` texts of at most `length` tokens, with room for the MTP layer."""
        layers = config.num_hidden_layers + 1
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        return cls(
            [torch.zeros(batch, length, latent) for _ in range(layers)],
            [torch.zeros(batch, length, config.index_head_dim) for _ in range(layers)],
        )

    @staticmethod
    def write(store_BTX: Tensor, rows_BSX: Tensor, positions_BS: Tensor) -> Tensor:
        """Write rows at their positions; returns the whole store."""
        store_BTX.scatter_(1, positions_BS[..., None].expand_as(rows_BSX), rows_BSX)
        return store_BTX


@dataclass
class Step:
    """What all layers of one forward share: positions, masks, mode, and the running top-k selection."""

    positions_BS: Tensor
    cos_BSD: Tensor
    sin_BSD: Tensor
    allowed_BST: Tensor  # causal: key position <= query position
    sparse: bool
    cache: Cache | None = None
    learn_index: bool = False
    selected_BSK: Tensor | None = None
    selected_BST: Tensor | None = None
    groups: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)  # (index scores, attention of its layers)

    @property
    def gathers(self) -> bool:
        """Whether attention gathers its selection (decoding) instead of masking all keys (prefill, training)."""
        return self.cache is not None and self.positions_BS.shape[1] <= 16


class Indexer(nn.Module):
    """Scores every key for every query; the best `index_topk` keys are attended to."""

    def __init__(self, config: VerifierConfig) -> None:
        super().__init__()
        self.heads, self.size, self.rope = config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim
        self.topk = config.index_topk
        self.wq_b = linear(config.q_lora_rank, self.heads * self.size)
        self.wk = linear(config.hidden_size, self.size)
        self.k_norm = nn.LayerNorm(self.size, eps=1e-6)
        self.weights_proj = linear(config.hidden_size, self.heads)

    def forward(self, x_BSH: Tensor, q_latent_BSL: Tensor, step: Step, layer: int) -> Tensor:
        """Index scores [B, S, T], minus infinity where the key lies after the query."""
        q_BSND = self.wq_b(q_latent_BSL).unflatten(-1, (self.heads, self.size)).float()
        k_BSND = self.k_norm(self.wk(x_BSH).float()).unsqueeze(2)
        q_BSND, k_BSND = (
            torch.cat([interleaved_rope(t[..., : self.rope], step.cos_BSD, step.sin_BSD), t[..., self.rope :]], dim=-1)
            for t in (q_BSND, k_BSND)
        )
        k_BTD = k_BSND.squeeze(2)
        if step.cache is not None:
            k_BTD = Cache.write(step.cache.index_BTD[layer], k_BTD, step.positions_BS)
        dots_BSNT = torch.einsum("bsnd,btd->bsnt", q_BSND, k_BTD).relu() * self.size**-0.5
        weights_BSN = F.linear(x_BSH.float(), self.weights_proj.weight).float() * self.heads**-0.5
        scores_BST = torch.einsum("bsn,bsnt->bst", weights_BSN.float(), dots_BSNT.float())
        return scores_BST.masked_fill(~step.allowed_BST, float("-inf"))

    def select_indices(self, scores_BST: Tensor) -> Tensor:
        """Indices [B, S, K] of the best keys; among equal scores (ReLU zeros) the lowest index wins."""
        count = min(self.topk, scores_BST.shape[-1])
        return scores_BST.sort(dim=-1, descending=True, stable=True).indices[..., :count]

    def select_mask(self, scores_BST: Tensor) -> Tensor:
        """The same selection as a mask [B, S, T], without a sort: all above the K-th score, then the first equals."""
        count = min(self.topk, scores_BST.shape[-1])
        last_BS1 = scores_BST.topk(count, dim=-1).values[..., -1:]
        above_BST, equal_BST = scores_BST > last_BS1, scores_BST == last_BS1
        room_BS1 = count - above_BST.sum(-1, keepdim=True)
        return above_BST | (equal_BST & (equal_BST.cumsum(-1) <= room_BS1))


class Attention(nn.Module):
    """Multi-head latent attention over the indexer's selection (or over all keys in the dense stage)."""

    def __init__(self, config: VerifierConfig, full: bool) -> None:
        super().__init__()
        self.heads, self.nope, self.rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        self.latent, self.value = config.kv_lora_rank, config.v_head_dim
        self.scale = (self.nope + self.rope) ** -0.5
        self.q_a_proj = linear(config.hidden_size, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, 1e-6)
        self.q_b_proj = linear(config.q_lora_rank, self.heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = linear(config.hidden_size, self.latent + self.rope)
        self.kv_a_layernorm = RMSNorm(self.latent, 1e-6)
        self.kv_b_proj = linear(self.latent, self.heads * (self.nope + self.value))
        self.o_proj = linear(self.heads * self.value, config.hidden_size)
        self.indexer = Indexer(config) if full else None

    def project(self, x_BSH: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """(query latents, queries [B, S, N, nope+rope], cache rows: latent and rotated shared key)."""
        q_latent_BSL = self.q_a_layernorm(self.q_a_proj(x_BSH))
        q_BSND = self.q_b_proj(q_latent_BSL).unflatten(-1, (self.heads, -1)).float()
        q_nope, q_rope = q_BSND.split([self.nope, self.rope], dim=-1)
        q_BSND = torch.cat([q_nope, interleaved_rope(q_rope, step.cos_BSD, step.sin_BSD)], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x_BSH).float().split([self.latent, self.rope], dim=-1)
        k_rope = interleaved_rope(k_rope.unsqueeze(2), step.cos_BSD, step.sin_BSD).squeeze(2)
        return q_latent_BSL, q_BSND, torch.cat([self.kv_a_layernorm(latent), k_rope], dim=-1)

    def expand(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [..., N, nope+rope] and values [..., N, value] of cache rows [..., latent+rope]."""
        latent, k_rope = rows.split([self.latent, self.rope], dim=-1)
        k_nope, value = self.kv_b_proj(latent).unflatten(-1, (self.heads, -1)).split([self.nope, self.value], dim=-1)
        k_rope = k_rope.unsqueeze(-2).expand(*k_nope.shape[:-1], self.rope).to(k_nope.dtype)
        return torch.cat([k_nope, k_rope], dim=-1), value

    def select(self, x_BSH: Tensor, q_latent_BSL: Tensor, step: Step, layer: int) -> None:
        """Run the indexer (inputs detached: only its own loss trains it) and note the selection in `step`."""
        if self.indexer is None or not (step.sparse or step.learn_index):
            return
        with torch.set_grad_enabled(step.learn_index):
            scores_BST = self.indexer(x_BSH.detach(), q_latent_BSL.detach(), step, layer)
        step.groups.append((scores_BST, []))
        if step.sparse and step.gathers:
            step.selected_BSK = self.indexer.select_indices(scores_BST)
        elif step.sparse:
            step.selected_BST = self.indexer.select_mask(scores_BST.detach()) & step.allowed_BST

    def forward(self, x_BSH: Tensor, step: Step, layer: int) -> Tensor:
        """Attention output [B, S, H]."""
        q_latent_BSL, q_BSND, rows_BSL = self.project(x_BSH, step)
        self.select(x_BSH, q_latent_BSL, step, layer)
        rows_BTL = rows_BSL
        if step.cache is not None:
            rows_BTL = Cache.write(step.cache.latent_BTL[layer], rows_BSL, step.positions_BS)
        attend = self.gathered if step.gathers else self.masked
        return self.o_proj(attend(q_BSND, rows_BTL, step).flatten(2))

    def masked(self, q_BSND: Tensor, rows_BTL: Tensor, step: Step) -> Tensor:
        """Attention over all keys under a mask: the training path."""
        key_BTND, value_BTND = self.expand(rows_BTL)
        dots_BNST = (q_BSND.to(key_BTND.dtype) * self.scale).transpose(1, 2) @ key_BTND.permute(0, 2, 3, 1)
        mask_BST = _noted(step.selected_BST) if step.sparse else step.allowed_BST
        probs_BNST = dots_BNST.float().masked_fill(~mask_BST.unsqueeze(1), float("-inf")).softmax(dim=-1)
        if step.learn_index:
            step.groups[-1][1].append(probs_BNST.detach().mean(dim=1))
        return (probs_BNST.to(value_BTND.dtype) @ value_BTND.transpose(1, 2)).transpose(1, 2)

    def gathered(self, q_BSND: Tensor, rows_BTL: Tensor, step: Step) -> Tensor:
        """Attention over the gathered selection: the decoding path, same result with few queries."""
        index_BSK = _noted(step.selected_BSK)
        batch, queries, count = index_BSK.shape
        rows_BSKL = rows_BTL.gather(1, index_BSK.flatten(1)[..., None].expand(-1, -1, rows_BTL.shape[-1]))
        rows_BSKL = rows_BSKL.view(batch, queries, count, -1)
        # kv_b_proj is absorbed: its key half into the query, its value half into the output.
        weight_NDL = self.kv_b_proj.weight.view(self.heads, -1, self.latent)
        key_NDL, value_NDL = weight_NDL.split([self.nope, self.value], dim=1)
        q_nope, q_rope = q_BSND.split([self.nope, self.rope], dim=-1)
        q_BSNL = torch.cat([torch.einsum("bsnd,ndl->bsnl", q_nope, key_NDL), q_rope], dim=-1)
        dots_BSNK = torch.einsum("bsnl,bskl->bsnk", q_BSNL * self.scale, rows_BSKL)
        future_BSK = index_BSK > step.positions_BS[..., None]
        probs_BSNK = dots_BSNK.masked_fill(future_BSK.unsqueeze(2), float("-inf")).softmax(dim=-1)
        latent_BSNL = torch.einsum("bsnk,bskl->bsnl", probs_BSNK, rows_BSKL[..., : self.latent])
        return torch.einsum("bsnl,ndl->bsnd", latent_BSNL, value_NDL)


def _noted(selection: Tensor | None) -> Tensor:
    """The selection that an indexer of this layer or one before noted. Raises `ValueError` where none did."""
    if selection is None:
        raise ValueError("no layer so far has an indexer")
    return selection
