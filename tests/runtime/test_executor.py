"""The reference executor: what it refuses, how it names things, and what it may not mix up."""

from __future__ import annotations

import pytest
import torch
from support.networks import author, run

from glmspec.core.errors import NetworkError
from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.network.reader import read
from glmspec.runtime.executor import ReferenceExecutor


def test_unknown_operation_is_an_error_that_names_the_layer():
    def body(x):
        with x.net.scope("model.layers.7.mlp"):
            return ops.unary(x, "ERF")

    with pytest.raises(NetworkError, match=r"model\.layers\.7\.mlp/erf\.1.*ERF"):
        run({"x": torch.ones(2, 3)}, body)


def test_unknown_layer_type_is_an_error_that_names_the_layer():
    def body(x):
        net = x.net
        with net.scope("model.layers.3"):
            layer = net.definition.add_einsum([x.trt, x.trt], "ij,ij->ij")
            return net.add(layer, "einsum")

    with pytest.raises(NetworkError, match=r"model\.layers\.3/einsum\.1.*EINSUM"):
        run({"x": torch.ones(2, 3)}, body)


def test_a_failing_step_names_the_layer():
    def body(table, index):
        with table.net.scope("model.embed_tokens"):
            return ops.gather(table, index)

    inputs = {"table": torch.zeros(4, 2), "index": torch.tensor([9], dtype=torch.int32)}
    with pytest.raises(NetworkError, match=r"model\.embed_tokens/gather\.1"):
        run(inputs, body)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"input x: missing, expected float32\[any, 3\]"),
        ({"x": torch.zeros(2, 4)}, r"input x: found float32\[2, 4\], expected float32\[any, 3\]"),
        ({"x": torch.zeros(2, 3, dtype=torch.int32)}, r"input x: found int32\[2, 3\]"),
    ],
)
def test_a_step_input_that_does_not_fit_is_named(given, message):
    net = author({"x": torch.zeros(2, 3)}, lambda x: x + 1.0)
    executor = ReferenceExecutor(read(net.definition, net.backend), {}, {})
    with pytest.raises(NetworkError, match=message):
        executor.run(given)


def test_bound_tensors_are_checked_by_name_and_shape():
    net = author({"x": torch.zeros(2, 3), "w": torch.zeros(3)}, lambda x, w: x + w, static=("w",))
    graph = read(net.definition, net.backend)
    with pytest.raises(NetworkError, match="nothing_like_it: the network has no such input"):
        ReferenceExecutor(graph, {"nothing_like_it": torch.zeros(3)}, {})
    with pytest.raises(NetworkError, match=r"input w: found float32\[4\], expected float32\[3\]"):
        ReferenceExecutor(graph, {"w": torch.zeros(4)}, {})


def test_layers_on_weights_alone_run_once_at_bind_time():
    def body(x, w):
        return x * ops.sigmoid(ops.reshape(w, (1, 3)))

    net = author({"x": torch.zeros(2, 3), "w": torch.zeros(3)}, body, static=("w",))
    w = torch.randn(3)
    executor = ReferenceExecutor(read(net.definition, net.backend), {"w": w}, {})
    assert len(executor.program.step_statements) == 1
    torch.testing.assert_close(executor.run({"x": torch.ones(2, 3)})["out0"], torch.sigmoid(w).expand(2, 3))


def test_one_rotation_per_set_of_positions():
    """Shared expressions are shared by value, not by the variable's name: freed names come back, so many sets in
    a row must not meet."""
    starts = [0, 7, 3, 11, 5, 0, 9, 2]
    rows = {f"at{number}": torch.arange(4, dtype=torch.int32) + start for number, start in enumerate(starts)}

    def body(x, table, *sets):
        made = []
        for positions in sets:
            gathered = ops.gather(table, positions)
            cos, sin = (ops.reshape(ops.narrow(gathered, 1, at, 2), (0, 1, 2)) for at in (0, 2))
            made.append(ops.rope(x, cos, sin, interleaved=True))
        return tuple(made)

    angle = torch.arange(16.0).unsqueeze(1) * torch.tensor([1.0, 0.1])
    inputs = {"x": torch.randn(4, 2, 4), "table": torch.cat([angle.cos(), angle.sin()], 1), **rows}
    pairs = torch.view_as_complex(inputs["x"].reshape(4, 2, 2, 2))
    for found, positions in zip(run(inputs, body, static=("table",)), rows.values(), strict=True):
        turn = torch.polar(torch.ones(4, 2), angle[positions]).unsqueeze(1)
        torch.testing.assert_close(found, torch.view_as_real(pairs * turn).flatten(-2))


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_turns_the_leading_columns_and_passes_the_rest(interleaved):
    x, angle = torch.randn(3, 2, 10), torch.rand(3, 1, 2)
    body = lambda x, cos, sin: ops.rope(x, cos, sin, interleaved=interleaved)  # noqa: E731
    (found,) = run({"x": x, "cos": angle.cos(), "sin": angle.sin()}, body)
    first, second = ([0, 2], [1, 3]) if interleaved else ([0, 1], [2, 3])
    torch.testing.assert_close(found[..., first], x[..., first] * angle.cos() - x[..., second] * angle.sin())
    torch.testing.assert_close(found[..., second], x[..., second] * angle.cos() + x[..., first] * angle.sin())
    torch.testing.assert_close(found[..., 4:], x[..., 4:])


def test_kv_update_writes_rows_to_their_slots_in_place():
    """Pages 3 (from slot 2 on), 1 (from 0): rows sorted by page, the rest of the cache untouched."""
    cache, rows = torch.zeros(5, 2, 4, 3), torch.randn(5, 2, 3)
    offset = torch.tensor([0, 0, 0, 2, 0], dtype=torch.int32)
    cumulative = torch.tensor([0, 0, 3, 3, 5, 5], dtype=torch.int32)
    net = author(
        {"cache": cache, "rows": rows, "offset": offset, "cumulative": cumulative}, ops.kv_update, static=("cache",)
    )
    executor = ReferenceExecutor(read(net.definition, net.backend), {}, {"cache": cache})
    out = executor.run({"rows": rows, "offset": offset, "cumulative": cumulative})["out0"]
    assert out.data_ptr() == cache.data_ptr()
    expected = torch.zeros(5, 2, 4, 3)
    for row, (page, slot) in enumerate([(1, 0), (1, 1), (1, 2), (3, 2), (3, 3)]):
        expected[page, :, slot] = rows[row]
    torch.testing.assert_close(cache, expected)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda x: ops.shift(x, 1, 2), lambda x: torch.nn.functional.pad(x, (0, 0, 2, 0))[:, :4]),
        (lambda x: ops.transpose(x, (2, 0, 1)), lambda x: x.permute(2, 0, 1)),
        (lambda x: ops.reshape(ops.transpose(x, (1, 0, 2)), (4, -1)), lambda x: x.permute(1, 0, 2).reshape(4, -1)),
        (lambda x: ops.softmax(x, 1), lambda x: x.softmax(1)),
        (lambda x: ops.reduce(x, "MIN", 2, keep=False), lambda x: x.amin(2)),
        (lambda x: ops.cumsum(ops.cast(x > 0.0, "int32"), 1), lambda x: (x > 0).cumsum(1).int()),
        (lambda x: ops.select(x > 0.0, x, float("-inf")), lambda x: torch.where(x > 0, x, -torch.inf)),
        (lambda x: 1.0 - x / 3.0, lambda x: 1 - x / 3),
        (lambda x: ops.cast(ops.cast(x, "bfloat16"), "float32"), lambda x: x.bfloat16().float()),
        (lambda x: ops.arange_like(x, 0), lambda x: torch.arange(len(x), dtype=torch.int32)),
        (lambda x: ops.concat([ops.narrow(x, 2, 3, 2), x], 2), lambda x: torch.cat([x[..., 3:5], x], 2)),
        (lambda x: ops.silu(x), torch.nn.functional.silu),
        (lambda x: ops.matmul(x, x, transpose_b=True), lambda x: x @ x.mT),
        (
            lambda x: ops.topk(x, 2, 1),
            lambda x: tuple(x.sort(dim=1, descending=True, stable=True)[i][:, :2] for i in (0, 1)),
        ),
    ],
)
def test_layers_mean_what_torch_means(body, expected):
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1))
    wanted = expected(x)
    for found, want in zip(run({"x": x}, body), wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        torch.testing.assert_close(found, want.to(found.dtype))


def test_integer_division_rounds_down():
    x = torch.arange(20, dtype=torch.int32).reshape(4, 5)
    (found,) = run({"x": x}, lambda x: x // 3)
    assert found.dtype == torch.int32 and torch.equal(found, x // 3)


def test_values_survive_reuse_of_their_names():
    """A long chain with side branches: freed variables must never be read again."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(4, 4, generator=g)

    def body(x: Tensor) -> Tensor:
        kept, value = [], x
        for step in range(12):
            value = ops.sigmoid(value) + value * (0.1 * step)
            if step % 3 == 0:
                kept.append(value)
        for one in kept:
            value = value + one
        return value

    def plain(x):
        kept, value = [], x
        for step in range(12):
            value = torch.sigmoid(value) + value * (0.1 * step)
            if step % 3 == 0:
                kept.append(value)
        return value + kept[0] + kept[1] + kept[2] + kept[3]

    torch.testing.assert_close(run({"x": x}, body)[0], plain(x))
