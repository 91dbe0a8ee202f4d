# CPU:  docker build -t tightfit . && docker run --rm tightfit fit --model llama-3.1-8b --device rtx3060-12
# CUDA: docker build -t tightfit:cuda --build-arg BASE=pytorch/pytorch:2.13.0-cuda12.8-cudnn9-runtime .
#       docker run --rm --gpus all -v "$PWD:/work" tightfit:cuda train run.yaml
ARG BASE=python:3.12-slim
FROM ${BASE}
# The image of PyTorch has torch, and it stays. Elsewhere the build for CPUs comes, without 3 GB of CUDA.
RUN python -c "import torch" 2>/dev/null || pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
ARG VERSION=0.2.0.dev0
RUN SETUPTOOLS_SCM_PRETEND_VERSION=${VERSION} pip install --no-cache-dir '/src[hf,lowbit,report]' && rm -rf /src
WORKDIR /work
ENTRYPOINT ["tightfit"]
CMD ["--help"]
