"""``calibrate`` runs no more of a model than it needs, and gives the bits of whole passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

from sparse24_plans import InvalidProblemError
from sparse24_plans.torch import calibrate
from sparse24_plans.torch.calibrated_block import Block

from .calibration_cases import Twice, inputs, token_batches, transformer
from .saved_models import same_state

BATCHES = 3


class Shared(nn.Module):
    """A block that calls one layer twice, and another as often as a batch has rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(nn.functional.gelu(self.twice(self.first(x))))
        return torch.cat([self.last(row[None]) for row in x])


def shared() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Shared(), Shared())


def of_growing_rows() -> list[torch.Tensor]:
    """Each batch has more rows than the one before it."""
    return [x[:rows] for rows, x in enumerate(inputs(count=BATCHES), start=2)]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list]]] = {
    **{
        name: (lambda name=name: transformer(name), token_batches)
        for name in ("BertModel", "LlamaForCausalLM", "Gemma3ForCausalLM", "GPT2LMHeadModel")
    },
    "shared layers": (shared, lambda: inputs(count=BATCHES)),
    "more calls in later batches": (shared, of_growing_rows),
    "fewer calls in later batches": (shared, lambda: of_growing_rows()[::-1]),
}


def never_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the block's calls run to their ends."""

    def whole(self: Block, name: str, take: Callable[..., None]) -> None:
        for batch, counted in enumerate(self._calls.counted):
            with self._seen([name], lambda _, *args, counted=counted: take(counted, *args)):
                self._output(batch)

    monkeypatch.setattr(Block, "_take_inputs", whole)


@pytest.mark.parametrize(
    ("name", "method"), [*((name, "wanda") for name in MODELS), ("shared layers", "sparsegpt")]
)
def test_calls_left_early_give_the_bits_of_complete_calls(name, method, monkeypatch):
    make, batches = MODELS[name]
    model = make()
    report = calibrate(model, batches(), method=method)
    never_left(monkeypatch)
    whole = make()
    assert calibrate(whole, batches(), method=method) == report
    assert same_state(model, whole)


@pytest.mark.parametrize("whole", [False, True])
def test_pass_ends_before_layers_whose_inputs_it_is_for(whole, monkeypatch):
    """Three layers in a row: the first pass finds them, one goes to each of them, the last gives outputs."""
    if whole:
        never_left(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3))))
    ran: Counter[nn.Module] = Counter()
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: ran.update([self]) or forward(self, x))
    calibrate(model, inputs(count=BATCHES), method="wanda")
    recorded = 1  # the first block runs once to show its result
    assert [ran[layer] for layer in model[0]] == [
        recorded + 1 + (4 * BATCHES if whole else (3 - at) * BATCHES) for at in range(3)
    ]


def test_the_head_runs_for_the_first_batch_alone():
    model = transformer("LlamaForCausalLM")
    calls: Counter[str] = Counter()
    for name in ("model.embed_tokens", "model.norm", "lm_head"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.update([name]))
    calibrate(model, token_batches(BATCHES), method="wanda")
    assert calls == {"model.embed_tokens": BATCHES, "model.norm": 1, "lm_head": 1}


def test_block_that_is_called_again_after_last_is_refused():
    with pytest.raises(InvalidProblemError, match="called once each"):
        calibrate(Twice([0, 1, 2, 2]), inputs())


def test_chunks_of_the_feed_forward_are_all_counted():
    """transformers' BERT calls its feed-forward once for each chunk of tokens."""
    found = []
    for chunk in (0, 8):
        model = transformer("BertModel")
        for layer in model.encoder.layer:
            layer.chunk_size_feed_forward = chunk
        (whole,) = token_batches(1)
        ids = [whole["input_ids"][:, :length] for length in (8, 24, 16)]
        found.append(calibrate(model, ids, method="wanda"))
    for chunked, plain in zip(found[1].layers, found[0].layers, strict=True):
        assert chunked.output_error == pytest.approx(plain.output_error, rel=1e-3)


class Careful(nn.Module):
    """A block that notes the exceptions of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)
        self.caught = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.inner(x)
        except Exception:
            self.caught += 1
            raise


def test_blocks_that_catch_exceptions_do_not_catch_end_of_calls():
    model = nn.Sequential(Careful(), Careful())
    assert len(calibrate(model, inputs()).layers) == 2
    assert [block.caught for block in model] == [0, 0]
