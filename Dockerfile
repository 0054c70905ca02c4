# flash_ext with what builds, tests and measures it; docs/use/container.md says how to use it.
#
# CUDA=on has the kernels for NVIDIA's cards, off those for the CPU alone, on a plain Debian. PACKAGES: more of the
# distribution's packages, as profilers. What changes seldom comes first: after a change of Python code nothing is
# compiled, after one of C++ what it touches.
ARG CUDA=on

FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS cuda-on
FROM debian:12-slim AS cuda-off

# hadolint ignore=DL3006
FROM cuda-${CUDA}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

ARG PACKAGES=""
# NOTE: PACKAGES is left to be split into words.
# hadolint ignore=DL3008,SC2086
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates ccache g++ git libgtest-dev python3 python3-dev python3-venv ${PACKAGES} \
    && rm -rf /var/lib/apt/lists/*

# A user with the number of the one who mounts code; Ubuntu's image has a user 1000 of its own.
ARG UID=1000
# hadolint ignore=DL3013
RUN python3 -m venv /opt/uv \
    && /opt/uv/bin/pip install --no-cache-dir uv \
    && if id ubuntu >/dev/null 2>&1; then userdel --remove ubuntu; fi \
    && useradd --no-log-init --create-home --home-dir /srv/flash --uid "${UID}" --shell /bin/bash flash \
    && mkdir -p /flash_ext /opt/venv /srv/flash/.cache/uv /srv/flash/.cache/ccache \
    && chown -R flash: /flash_ext /opt/venv /srv/flash

ENV PATH=/opt/venv/bin:/opt/uv/bin:$PATH \
    VIRTUAL_ENV=/opt/venv \
    UV_PROJECT_ENVIRONMENT=/opt/venv \
    UV_LINK_MODE=copy \
    CCACHE_DIR=/srv/flash/.cache/ccache \
    CCACHE_BASEDIR=/flash_ext \
    CCACHE_NOHASHDIR=1
WORKDIR /flash_ext
USER ${UID}

ARG CUDA
ARG UV_INDEX
ENV FLASH_EXT_CUDA=${CUDA}
COPY --chown=flash pyproject.toml ./
RUN --mount=type=cache,target=/srv/flash/.cache/uv,uid=${UID} \
    if [ "${CUDA}" = on ]; then \
        uv sync --no-install-project --group nvcc; \
    else \
        uv sync --no-install-project; \
    fi

COPY --chown=flash setup.py CMakeLists.txt ./
COPY --chown=flash cmake cmake
COPY --chown=flash csrc csrc
RUN --mount=type=cache,target=/srv/flash/.cache/ccache,uid=${UID} \
    python setup.py build_ext --inplace

COPY --chown=flash . .
RUN --mount=type=cache,target=/srv/flash/.cache/uv,uid=${UID} \
    --mount=type=cache,target=/srv/flash/.cache/ccache,uid=${UID} \
    uv sync --inexact

HEALTHCHECK --interval=5m --timeout=2m --start-period=1m CMD ["python", "-m", "flash_ext.doctor"]
CMD ["python", "-m", "flash_ext.doctor"]
