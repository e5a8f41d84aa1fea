# fedlight in a container. For processors alone, name an index with torch's builds for them, which are ten times smaller:
#   docker build --tag fedlight --build-arg TORCH_INDEX=URL .
#   docker run --rm --volume "$PWD/runs:/work/runs" fedlight run demo
# With CUDA, which torch's default build for Linux brings itself; the host needs the NVIDIA container toolkit:
#   docker build --tag fedlight:cuda .
#   docker run --rm --gpus all --volume "$PWD/runs:/work/runs" fedlight:cuda fit --config selector.yaml --trainer.accelerator cuda
FROM python:3.11-slim AS build
ARG TORCH_INDEX=""
ARG EXTRAS="privacy,chat,hnsw,flower"
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
RUN python -m venv /opt/fedlight
COPY constraints.txt .
RUN if [ -n "$TORCH_INDEX" ]; then \
      /opt/fedlight/bin/pip install --no-cache-dir --constraint constraints.txt --index-url "$TORCH_INDEX" torch; \
    fi
COPY . .
RUN /opt/fedlight/bin/pip install --no-cache-dir --constraint constraints.txt ".[$EXTRAS]"

FROM python:3.11-slim
RUN useradd --create-home fedlight && mkdir /work && chown fedlight /work
COPY --from=build /opt/fedlight /opt/fedlight
ENV PATH=/opt/fedlight/bin:$PATH
USER fedlight
WORKDIR /work
ENTRYPOINT ["fedlight"]
CMD ["--help"]
