"""Where sparse-rl and the vLLM that it supports are installed from. No package index has sparse-rl."""

URL = ""  # of its repository, as pip takes it: "git+https://..."; empty: it is not published, a checkout is needed
VLLM = "0.31.*"
INSTALL_VLLM = f'pip install "vllm=={VLLM}"'


def how_to_install(extra: str = "") -> str:
    """In Markdown, the command that installs sparse-rl, with what one of its extras brings."""
    extras = f"[{extra}]" if extra else ""
    return f'`pip install "sparse-rl{extras} @ {URL}"`' if URL else f'`pip install ".{extras}"` in a checkout of it'
