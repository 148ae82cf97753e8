# One image per service: docker build --build-arg SERVICE=builder --tag rollmill-builder .
# SERVICE is capture, builder, evaluator, reward-merger or batcher; `demo` has the demo's requirements and no service.
# EXTRAS adds further extras of the package, with a comma between: blobs, tokenizer, swebench.
ARG BASE=python:3.11.13-slim-bookworm

FROM ${BASE} AS wheel
# pip reads PIP_INDEX_URL and PIP_EXTRA_INDEX_URL by itself: mirrors, or builds of PyTorch for CPUs alone.
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY shared ./shared
COPY services ./services
COPY schemas ./schemas
COPY deploy/image.sh ./deploy/image.sh
RUN deploy/image.sh wheel /source /dist
ARG SERVICE EXTRAS
RUN deploy/image.sh install /dist /opt/rollmill "${SERVICE:?is missing}${EXTRAS:+,$EXTRAS}"

FROM ${BASE}
ARG SERVICE
# What the evaluator's sandbox consists of, and what makes work trees in it.
RUN if [ "$SERVICE" = evaluator ]; then \
      apt-get update && apt-get install -y --no-install-recommends bubblewrap git patch && rm -rf /var/lib/apt/lists/*; \
    fi
# Named volumes take over the owner of the folder that they are mounted on.
RUN install -d -o 10001 -g 10001 /var/lib/rollmill /var/lib/rollmill/spool /var/lib/rollmill/spill
COPY --from=wheel /opt/rollmill /opt/rollmill
COPY deploy/start.sh /usr/local/bin/rollmill-start
ENV SERVICE=${SERVICE} PATH=/opt/rollmill/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["rollmill-start"]
