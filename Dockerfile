# The package, its commands and the configs, for GKE; docs/launching.md says how it is started on every host of a slice.
#
#     docker build -t tpu_grpo .
#     docker run --rm tpu_grpo plan configs/qwen3_8b_v5e_16.yaml --slice v5e-16 --fast
FROM python:3.12.12-slim-bookworm AS build
RUN pip install --no-cache-dir uv==0.13.9
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY tpu_grpo tpu_grpo
COPY configs configs
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_NO_CACHE=1 UV_PROJECT_ENVIRONMENT=/opt/tpu_grpo UV_PYTHON=/usr/local/bin/python
RUN uv sync --no-dev --no-editable --extra gcs

FROM python:3.12.12-slim-bookworm
RUN useradd --uid 1000 --create-home trainer && install -d -o trainer /run_here
COPY --from=build /opt/tpu_grpo /opt/tpu_grpo
COPY configs /run_here/configs
ENV PATH="/opt/tpu_grpo/bin:$PATH"
WORKDIR /run_here
USER 1000
ENTRYPOINT ["tpu-grpo"]
CMD ["--help"]
