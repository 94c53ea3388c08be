# sparse-rl for CPUs (x86-64, 4 GB), from requirements/cpu.lock:
#     docker build -t sparse-rl .
#     docker run --rm -it -v "$PWD/runs:/home/researcher/sparse-rl/runs" sparse-rl make quickstart
FROM python:3.11-slim-bookworm

# A compiler, because PyTorch and vLLM compile kernels while they run; libnuma, which vLLM loads.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ libnuma1 make \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 researcher \
 && install -d -o researcher /home/researcher/sparse-rl /home/researcher/.cache

USER 1000
WORKDIR /home/researcher/sparse-rl
ENV PIP_NO_CACHE_DIR=1 PATH=/home/researcher/sparse-rl/.venv/bin:$PATH

# The packages are a layer of their own, which a change of the code does not build again.
COPY --chown=1000 Makefile ./
COPY --chown=1000 requirements requirements
RUN make packages

COPY --chown=1000 . .
RUN make install

CMD ["sparse-rl", "--help"]
