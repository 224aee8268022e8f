"""Make a transformers model 2:4 in place, load one from a compressed checkpoint, and generate with both.

This example runs on the GPU where PyTorch and CuPy see one, else on the CPU. The model is a tiny Llama with
random weights. Without PyTorch or transformers it says so.
"""

import tempfile
from pathlib import Path

from sparse24_plans import compress_checkpoint, convert_checkpoint

try:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    print(f"{error.name} is not installed; nothing was run.")
    raise SystemExit(0) from None

from sparse24_plans.torch import from_pretrained, to_sparse24

device = "cuda" if torch.cuda.is_available() else "cpu"
config = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=False,
)
torch.manual_seed(0)
with torch.device(device):
    model = LlamaForCausalLM(config).eval()
for parameter in model.parameters():  # not the rotary frequencies, which are buffers
    parameter.data = parameter.data.to(torch.bfloat16)
prompt = torch.arange(8, device=device)[None]
options = {"max_new_tokens": 12, "do_sample": False}

with tempfile.TemporaryDirectory() as folder:
    # The checkpoint is pruned and compressed on disk, then converted to llm-compressor's format.
    dense, ours, theirs = (Path(folder, name) for name in ("dense", "ours", "compressed-tensors"))
    model.save_pretrained(dense)
    compress_checkpoint(dense, ours, exclude=["lm_head*"], device="host")
    convert_checkpoint(ours, theirs, from_format="sparse24", to_format="compressed_tensors")
    loaded = from_pretrained(theirs, device=device)

# Swapping in place prunes the same layers by the same rule.
report = to_sparse24(model, exclude=["lm_head"])
print(report)
print(model.model.layers[0].mlp.up_proj)

swapped_tokens = model.generate(prompt, **options)
loaded_tokens = loaded.generate(prompt, **options)
print("swapped:", swapped_tokens[0].tolist())
print("loaded: ", loaded_tokens[0].tolist())
assert torch.equal(swapped_tokens, loaded_tokens)
