"""Install sources of sparse-rl and of the supported vLLM version. sparse-rl is not on any package index."""

URL = ""  # the repository's URL for pip, "git+https://..."; empty if unpublished, so that installing needs a checkout
VLLM = "0.32.*"
INSTALL_VLLM = f'pip install "vllm=={VLLM}"'


def how_to_install(extra: str = "") -> str:
    extras = f"[{extra}]" if extra else ""
    return f'`pip install "sparse-rl{extras} @ {URL}"`' if URL else f'`pip install ".{extras}"` in a checkout of it'
