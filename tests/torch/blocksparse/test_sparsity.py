"""The layouts of DeepSpeed's sparsity configurations, block by block from their definitions."""

import copy
import pickle
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import InvalidProblemError, UnsupportedError
from sparse24_plans.torch.blocksparse import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    MultiheadAttention,
    SparsityConfig,
    SparsityInfo,
    VariableSparsityConfig,
)

HEADS = 3
sides = st.integers(1, 13)
ways = st.sampled_from(["unidirectional", "bidirectional"])
flags = st.booleans()
few = settings(max_examples=150)


def bitmap(config: SparsityConfig, side: int) -> np.ndarray:
    found = config.make_layout(side * config.block)
    assert (found.dtype, tuple(found.shape)) == (torch.int64, (HEADS, side, side))
    assert set(found.unique().tolist()) <= {0, 1}
    return found.numpy().astype(bool)


def by_cell(side: int, keeps) -> np.ndarray:
    """The bitmap of one head in which keeps(row, column)."""
    return np.array([[bool(keeps(row, column)) for column in range(side)] for row in range(side)])


def local(sizes: list[int], side: int, one_way: bool) -> np.ndarray:
    """Windows one after the other, the last size again and again."""
    kept, start, sizes = np.zeros((side, side), bool), 0, list(sizes)
    while start < side:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        for row in range(start, min(start + size, side)):
            kept[row, start : (row + 1 if one_way else min(start + size, side))] = True
        start += size
    return kept


def test_dense_keeps_all():
    assert bitmap(DenseSparsityConfig(HEADS), 5).all()


@few
@given(st.data())
def test_fixed(data):
    width = data.draw(st.integers(1, 3))
    per_window = data.draw(st.integers(1, 3))
    step, side = width * per_window, data.draw(sides)
    one_way, each = data.draw(ways) == "unidirectional", data.draw(flags)
    rows_too = not one_way and data.draw(flags)
    patterns = data.draw(st.integers(1, per_window)) if each else 1
    way = "unidirectional" if one_way else "bidirectional"
    config = FixedSparsityConfig(HEADS, 16, each, step, width, way, rows_too, patterns)
    found = bitmap(config, side)
    for head in range(HEADS):
        kept, first = local([step], side, one_way), step - (1 + (head if each else 0) % patterns) * width
        whole = side // step * step
        starts = [*range(first, whole, step)]
        if whole < side:
            starts.append(min(whole + first, side - width))
        for start in starts:  # DeepSpeed's slices, whose start is negative if all blocks are fewer
            kept[start if one_way else 0 :, start : start + width] = True
            kept[start : start + width] |= rows_too
        assert (found[head] == kept).all()


@few
@given(
    sides,
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.lists(st.integers(0, 14), max_size=3),
    ways,
    flags,
)
def test_variable(side, sizes, indices, way, rows_too):
    one_way = way == "unidirectional"
    rows_too = rows_too and not one_way
    config = VariableSparsityConfig(HEADS, 32, False, 0, sizes, indices, None, way, rows_too)
    kept = local(sizes, side, one_way)
    for at in (index for index in indices if index < side):
        kept[at if one_way else 0 :, at] = True
        kept[at, :] |= rows_too
    assert (bitmap(config, side) == kept).all()
    ranges = VariableSparsityConfig(
        HEADS, 32, False, 0, sizes, indices, [at + 1 for at in indices], way, rows_too
    )
    assert (bitmap(ranges, side) == kept).all()


@pytest.mark.parametrize("way", ["bidirectional", "unidirectional"])
def test_variable_draws_random_blocks_for_every_row(way):
    """They may lie beyond a row's own block, as in DeepSpeed."""
    options = {"local_window_blocks": [1], "global_block_indices": [], "attention": way}
    found = bitmap(VariableSparsityConfig(HEADS, 16, True, 5, **options), 20)
    others = found & ~np.eye(20, dtype=bool)
    assert found[:, np.arange(20), np.arange(20)].all()
    assert set(np.unique(others.sum(axis=2))) == {4, 5}  # one may be the row's own
    assert np.triu(others, 1).any()
    assert (found[0] != found[1]).any()
    assert (bitmap(VariableSparsityConfig(HEADS, 16, True, 5, **options), 20) == found).all()
    assert (bitmap(VariableSparsityConfig(HEADS, 16, True, 5, **options, seed=1), 20) != found).any()


@few
@given(st.integers(3, 13), st.integers(0, 3), st.integers(1, 3), st.integers(1, 3), ways)
def test_bigbird_and_its_random_blocks(side, random, window, most, way):
    one_way = way == "unidirectional"
    config = BigBirdSparsityConfig(HEADS, 16, True, random, window, most, way)
    found = bitmap(config, side)

    def keeps(row, column):
        near = abs(row - column) <= window // 2
        return (near or min(row, column) < most) and not (one_way and column > row)

    fixed = by_cell(side, keeps)
    assert (found[:, fixed]).all()
    more = (found & ~fixed).sum(axis=2)
    assert (more <= random).all()
    drawn_from = np.arange(1, side + 1) if one_way else side
    assert (found.sum(axis=2) >= np.minimum(random, drawn_from)).all()
    assert not (one_way and np.triu(found, 1).any())
    assert (bitmap(config, side) == found).all(), "the same configuration gave another layout"
    if random and side > 9 and not one_way:
        again = BigBirdSparsityConfig(HEADS, 16, True, random, window, most, way, seed=1)
        assert (bitmap(again, side) != found).any()


@few
@given(st.integers(3, 13), st.integers(1, 3), st.lists(st.integers(0, 14), max_size=3), ways)
def test_longformer(side, window, indices, way):
    def keeps(row, column):
        near = abs(row - column) <= window // 2 or row in indices or column in indices
        return near and not (way == "unidirectional" and column > row)

    config = BSLongformerSparsityConfig(HEADS, 16, False, window, indices, None, way)
    assert (bitmap(config, side) == by_cell(side, keeps)).all()


@few
@given(st.integers(5, 13), st.integers(1, 5), ways)
def test_a_local_window(side, window, way):
    config = LocalSlidingWindowSparsityConfig(HEADS, 16, window, way)

    def keeps(row, column):
        return abs(row - column) <= window // 2 and not (way == "unidirectional" and column > row)

    assert (bitmap(config, side) == by_cell(side, keeps)).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FixedSparsityConfig(2, 24), "block: expected 16, 32, 64 or 128, got 24"),
        (lambda: DenseSparsityConfig(0), "num_heads: expected an integer from 1 to 2147483647, got 0"),
        (lambda: FixedSparsityConfig(2, num_global_blocks=3), "num_global_blocks: expected a divisor"),
        (lambda: FixedSparsityConfig(2, attention="both"), "attention: expected unidirectional or"),
        (lambda: FixedSparsityConfig(2, num_different_global_patterns=2), "expected from 1 to 1, got 2"),
        (
            lambda: FixedSparsityConfig(2, attention="unidirectional", horizontal_global_attention=True),
            "horizontal_global_attention: expected False",
        ),
        (lambda: VariableSparsityConfig(2, local_window_blocks=[]), "local_window_blocks: expected sizes"),
        (
            lambda: VariableSparsityConfig(2, global_block_end_indices=[1, 2]),
            "expected 1, as global_block_ind",
        ),
        (
            lambda: BSLongformerSparsityConfig(2, global_block_end_indices=[0]),
            "expected ends beyond the starts",
        ),
        (lambda: FixedSparsityConfig("4"), "num_heads: expected an integer from 1 to 2147483647, got '4'"),
        (lambda: FixedSparsityConfig(2, True), "block: expected 16, 32, 64 or 128, got True"),
        (lambda: FixedSparsityConfig(2, 16, 1), "different_layout_per_head: expected True or False, got 1"),
        (lambda: FixedSparsityConfig(2, num_local_blocks=0), "num_local_blocks: .* integer from 1 .*, got 0"),
        (
            lambda: FixedSparsityConfig(2, num_local_blocks=-4),
            "num_local_blocks: expected an integer from 1 .*, got -4",
        ),
        (
            lambda: FixedSparsityConfig(2, num_local_blocks=2**31),
            "num_local_blocks: expected an integer from 1 .*, got 2147483648",
        ),
        (lambda: VariableSparsityConfig(2, seed=-1), "seed: expected an integer from 0 to 92233.*, got -1"),
        (
            lambda: VariableSparsityConfig(2, local_window_blocks=4),
            "local_window_blocks: expected a sequence",
        ),
        (
            lambda: VariableSparsityConfig(2, local_window_blocks=[4, 0]),
            "local_window_blocks: expected an integer from 1 .*, got 0",
        ),
        (lambda: VariableSparsityConfig(2, local_window_blocks="44"), "local_window_blocks: expected a sequ"),
        (
            lambda: VariableSparsityConfig(2, global_block_indices=[-1]),
            "global_block_indices: expected an integer from 0 .*, got -1",
        ),
        (
            lambda: BSLongformerSparsityConfig(2, global_block_indices=0),
            "global_block_indices: expected a se",
        ),
        (
            lambda: BigBirdSparsityConfig(2, num_random_blocks=1.0),
            "num_random_blocks: expected an integer from 0 .*, got 1\\.0",
        ),
        (lambda: SparsityInfo(stride=0), "stride: expected an integer from 1 .*, got 0"),
        (lambda: SparsityInfo(unidirectional=None), "unidirectional: expected True or False, got None"),
        (lambda: SparsityInfo().layout(0, 128), "heads: expected an integer from 1 .*, got 0"),
        (lambda: BigBirdSparsityConfig(2).make_layout(32), "num_sliding_window_blocks: expected at most 2"),
        (lambda: DenseSparsityConfig(2).make_layout(40), "tokens: expected a multiple of 16, got 40"),
        (lambda: DenseSparsityConfig(2).make_layout(-64), "tokens: expected an integer from 0 .*, got -64"),
        (lambda: DenseSparsityConfig(2).make_layout(64.0), "tokens: expected an integer from 0 .*, got 64.0"),
        (lambda: DenseSparsityConfig(2).layout("2", 64), "num_heads: expected '2', as the module has, got 2"),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises(InvalidProblemError, match=words):
        make()


RULES = (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    VariableSparsityConfig,
    SparsityInfo,
)
odd_numbers = st.one_of(
    st.integers(-3, 4), st.integers(max_value=-1), st.integers(min_value=2**31), st.floats()
)
hostile = st.one_of(
    odd_numbers,
    st.none(),
    st.booleans(),
    st.text(max_size=2),
    st.binary(max_size=2),
    st.lists(st.one_of(odd_numbers, st.none(), st.text(max_size=1)), max_size=3),
    st.builds(object),
    odd_numbers.filter(lambda one: abs(one) < 5).map(np.array),
    st.lists(st.integers(-3, 3), max_size=3).map(torch.tensor),
    st.sampled_from([np.int8(2), np.ones((2, 2)), torch.ones(1), torch.ones(1, device="meta")]),
)


@settings(max_examples=200)
@given(st.data())
def test_hostile_values_are_refused_by_name(data):
    """A rule makes a layout, or names the field or argument that it doesn't take."""
    kind = data.draw(st.sampled_from(RULES))
    names = [one.name for one in fields(kind) if one.init]
    given = data.draw(st.dictionaries(st.sampled_from(names), hostile, min_size=1, max_size=2))
    tokens = data.draw(st.one_of(st.sampled_from([0, 64, 128, np.int64(256)]), hostile))
    needed, at_once = {} if kind is SparsityInfo else {"num_heads": 2}, data.draw(flags)

    def layout():
        rule = kind(**needed | given) if at_once else kind(**needed)
        for name, one in given.items():
            setattr(rule, name, one)
        return rule.layout(getattr(rule, "num_heads", 2), tokens)

    try:
        made = layout()
    except InvalidProblemError as error:
        refused = set(str(error).partition(":")[0].split(", "))
    else:
        refused = set()
        assert made.shape.rows == made.shape.cols == tokens
    assert refused <= {*names, "tokens"}


# Rules that change, and rules of a caller's own -------------------------------------------------------


def test_a_rules_fields_may_be_set_one_by_one():
    """Torch-Blocksparse's call form. A layout that is made afterwards follows them."""
    info = MultiheadAttention.SparsityInfo()
    info.mode, info.block, info.unidirectional = "dense", 16, False
    assert info == SparsityInfo("dense", 16)
    assert info.layout(1, 16).bitmap.shape == (1, 1, 1)
    info.block = 24
    with pytest.raises(InvalidProblemError, match="block: expected 16, 32, 64 or 128, got 24"):
        info.layout(1, 48)
    config = FixedSparsityConfig(2)
    before = copy.deepcopy(config)
    config.num_local_blocks = 2
    assert (config.make_layout(64) != before.make_layout(64)).any()
    config.num_local_blocks = 0
    for call in (config.make_layout, lambda tokens: config.layout(2, tokens)):
        with pytest.raises(InvalidProblemError, match=r"num_local_blocks: .* from 1 .*, got 0"):
            call(64)


class Diagonal(SparsityConfig):
    """A rule in the form that DeepSpeed documents."""

    def __init__(self, num_heads: int, block: int = 16, *, each: bool = False, offset: int = 0) -> None:
        super().__init__(num_heads, block, each)
        self.offset = offset

    def make_layout(self, seq_len: int) -> torch.Tensor:
        layout = self.setup_layout(seq_len)
        for head in range(self.num_layout_heads):
            layout[head].fill_diagonal_(1)
            layout[head, :, self.offset + head] = 1
        return self.check_and_propagate_first_head_layout(layout)


@pytest.mark.parametrize("each", [False, True])
def test_a_subclass_makes_its_own_layout(each):
    config = Diagonal(2, each=each, offset=1)
    assert config.num_layout_heads == (2 if each else 1)
    kept = np.stack([np.eye(4, dtype=bool)] * 2)
    kept[0, :, 1] = kept[1, :, 2 if each else 1] = True
    module = MultiheadAttention(32, 2, config)
    assert (module.layout_for(64).layout.bitmap == kept).all()
    x = torch.randn(64, 3, 32)
    given = MultiheadAttention(32, 2, kept, 16)
    given.load_state_dict(module.state_dict(), strict=False)
    torch.testing.assert_close(module(x, x, x)[0], given(x, x, x)[0])


def test_a_subclass_of_a_rule_may_override_its_layout():
    class Lower(FixedSparsityConfig):
        def make_layout(self, seq_len):
            return super().make_layout(seq_len).tril()

    assert not np.triu(Lower(2).layout(2, 128).bitmap, 1).any()


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (torch.ones(2, 3, 3).long(), r"make_layout: expected a bitmap \[2, 4, 4\] of 64 tokens, got .*3, 3"),
        (None, r"make_layout: expected a bitmap \[2, 4, 4\] of 64 tokens, got None"),
        (torch.full((2, 4, 4), 2), "bitmap: expected 0 or 1, got 2"),
    ],
)
def test_a_subclass_that_makes_no_layout_is_refused(made, words):
    class Wrong(SparsityConfig):
        def make_layout(self, seq_len):
            return made

    with pytest.raises(InvalidProblemError, match=words):
        Wrong(2).layout(2, 64)


def test_the_base_says_what_to_override():
    for call in (SparsityConfig(2).make_layout, lambda tokens: SparsityConfig(2).layout(2, tokens)):
        with pytest.raises(UnsupportedError, match="make_layout: expected SparsityConfig to override it"):
            call(64)


@pytest.mark.parametrize("config", [FixedSparsityConfig(2), BigBirdSparsityConfig(2, 16, True)])
def test_attention_over_a_configuration(config):
    torch.manual_seed(0)
    module = MultiheadAttention(32, 2, config, attn_mask_mode="add").eval()
    dense = torch.nn.MultiheadAttention(32, 2).eval()
    state = {name: one for name, one in module.state_dict().items() if "layouts" not in name}
    dense.load_state_dict(state)
    x = torch.randn(96, 3, 32)
    kept = torch.from_numpy(np.kron(config.make_layout(96), np.ones((1, 16, 16)))).repeat(3, 1, 1) > 0
    wanted, _ = dense(x, x, x, attn_mask=~kept)
    torch.testing.assert_close(module(x, x, x)[0], wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(InvalidProblemError, match="num_heads: expected 4, as the module has, got 2"):
        MultiheadAttention(32, 4, config).layout_for(96)


THEIRS = {
    "order": lambda c: c("fixed", 32, 96, "bidirectional", 2, 1),
    "keywords": lambda c: c(mode="fixed", block=32, stride=96, attention="bidirectional", numverts=2),
    "no mode": lambda c: c(stride=96, block=32, attention="bidirectional", numverts=2),
}


@pytest.mark.parametrize("form", THEIRS)
def test_torch_blocksparses_class_of_the_name(form):
    """Torch-Blocksparse's class has no ``num_heads``. A copy of a configuration stays a configuration."""
    assert THEIRS[form](SparsityConfig) == SparsityInfo("fixed", 32, 96, False, 2)
    assert SparsityConfig() == SparsityInfo("fixed", 16, 64, True)
    found = SparsityConfig(attention="bidirectional")
    assert found.attention == "bidirectional"
    found.attention = "unidirectional"
    assert found == SparsityConfig()
    with pytest.raises(InvalidProblemError, match="attention: expected unidirectional or bidirectional, got"):
        found.attention = "causal"
    with pytest.raises(InvalidProblemError, match="attention: expected unidirectional or bidirectional, got"):
        SparsityConfig("fixed", 16, 64, "causal")
    for config in (SparsityConfig(4), SparsityConfig(num_heads=4, block=32), DenseSparsityConfig(4)):
        for found in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
            assert type(found) is type(config)
            assert found == config
