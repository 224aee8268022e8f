"""Other libraries' extension points. Each module imports its host, and is itself imported after its host."""


def register_vllm() -> None:
    """Register the quantization method ``sparse24`` with vLLM, which calls this in each process."""
    from . import vllm as vllm  # registers when it is imported
