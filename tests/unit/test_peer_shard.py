"""How a shard is cut into buckets for another engine, and what makes two shards alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.weights.peer_shard import Place, Shard, compare
from asyncrl.weights.wire import WeightUpdateError

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64)
SHAPES = st.lists(
    st.tuples(st.lists(st.integers(0, 7), max_size=3), st.sampled_from(DTYPES)), min_size=1, max_size=6
)


def shard_of(shapes: list[tuple[list[int], torch.dtype]], seed: int) -> Shard:
    generator = torch.Generator().manual_seed(seed)
    parameters = {}
    for idx, (shape, dtype) in enumerate(shapes):
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
        parameters[f"p{idx}"] = data.view(dtype).view(shape) if num_bytes else torch.empty(shape, dtype=dtype)
    return Shard(parameters)


def bytes_of(shard: Shard) -> list[bytes]:
    return [bytes(tensor.view(-1).view(torch.uint8).numpy()) for tensor in shard.tensors]


@settings(deadline=None)
@given(SHAPES, st.integers(1, 200))
def test_every_byte_arrives_through_buckets_of_at_most_one_row_more(
    shapes: list[tuple[list[int], torch.dtype]], bucket_bytes: int
) -> None:
    source, target = shard_of(shapes, 1), shard_of(shapes, 2)
    sent, arrived = (torch.zeros(len(shapes), dtype=torch.int64) for _ in range(2))
    longest_row = max((t.shape[-1] if t.dim() else 1) * t.element_size() for t in source.tensors)
    cuts = zip(source.cut(bucket_bytes), target.cut(bucket_bytes), strict=True)
    for (num_bytes, packs), (also, unpacks) in cuts:
        assert num_bytes == also and 0 < num_bytes <= max(bucket_bytes, longest_row)
        space = torch.zeros(num_bytes, dtype=torch.uint8)
        packs.pack(source.tensors, space, sent)
        unpacks.unpack(target.tensors, space, arrived)
    assert bytes_of(source) == bytes_of(target)
    assert torch.equal(sent, arrived)


def test_the_order_of_parameters_does_not_matter() -> None:
    one, other = torch.zeros(2), torch.ones(3, dtype=torch.bfloat16)
    assert Shard({"a": one, "b": other}).described == Shard({"b": other, "a": one}).described
    assert Shard({"b": other, "a": one}).described == [["a", [2], "float32"], ["b", [3], "bfloat16"]]


@pytest.mark.parametrize(
    ("own", "difference"),
    [
        ([["a", [2], "float32"]], r"b is \[\[3\], 'bfloat16'\] at the source, \['missing'\] on this rank"),
        ([["a", [2], "float32"], ["b", [4], "bfloat16"]], r"b is \[\[3\], .* \[\[4\], 'bfloat16'\] on this"),
        ([["a", [2], "int32"], ["b", [4], "int32"]], r"a is \[\[2\], 'float32'\] at the source"),
    ],
)
def test_the_first_difference_is_named(own: list[list[object]], difference: str) -> None:
    given_by_source = [["a", [2], "float32"], ["b", [3], "bfloat16"]]
    compare(given_by_source, given_by_source)
    with pytest.raises(WeightUpdateError, match=difference):
        compare(given_by_source, own)


def test_what_cannot_be_moved_is_named() -> None:
    with pytest.raises(WeightUpdateError, match="turned is not contiguous"):
        Shard({"turned": torch.zeros(2, 3).t()})
    with pytest.raises(WeightUpdateError, match=r"wide is not contiguous, or of torch.complex128"):
        Shard({"wide": torch.zeros(2, dtype=torch.complex128)})


@pytest.mark.parametrize("address", ["nowhere", "host:", ":12", "host:12a"])
def test_an_address_names_host_and_port(address: str) -> None:
    assert Place.at("10.0.0.7:812", "group", 3) == Place("10.0.0.7", 812, "group", 3)
    with pytest.raises(WeightUpdateError, match="is no address of an engine"):
        Place.at(address, "group", 0)
