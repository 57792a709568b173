# Three images of one file: `builder` installs, `sao` runs everything of ours, `s3` is the object store beside the same
# tools, so that its health check can put and get.
FROM python:3.11.15-slim-bookworm AS builder

# torch as the CPU or a CUDA build; without it the package index's own, which is a CUDA build of several GB.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/sao
ENV PATH=/opt/sao/bin:$PATH
WORKDIR /src

# What changes seldom comes first: torch, then the other dependencies, then the package.
COPY constraints.txt pyproject.toml ./
RUN pip install -c constraints.txt --extra-index-url "$TORCH_INDEX" torch
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print('\n'.join(p['dependencies'] + p['optional-dependencies']['team']))" > requirements.txt \
 && pip install -c constraints.txt --extra-index-url "$TORCH_INDEX" -r requirements.txt
COPY README.md LICENSE ./
COPY sao_core sao_core
COPY infra infra
COPY tasks tasks
COPY flows flows
RUN pip install --no-deps . && sao recipes

FROM python:3.11.15-slim-bookworm AS sao

# bubblewrap isolates code that a model wrote.
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --home-dir /var/lib/sao --create-home --shell /usr/sbin/nologin sao
COPY --from=builder /opt/sao /opt/sao
ENV PATH=/opt/sao/bin:$PATH HOME=/var/lib/sao SAO_HOME=/var/lib/sao PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /var/lib/sao
USER sao
CMD ["sao", "--help"]

FROM chrislusf/seaweedfs:4.48 AS seaweedfs

FROM sao AS s3

USER root
COPY --from=seaweedfs /usr/bin/weed /usr/local/bin/weed
RUN mkdir /data && chown sao:sao /data
WORKDIR /data
USER sao
CMD ["weed", "version"]

# The last stage is what `docker build .` makes.
FROM sao
