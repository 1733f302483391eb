# The server, computing on CPUs: docs/server.md says how to build and run it. Checked with hadolint, and its commands
# were run one by one in a Debian 12 system; the image has not been built yet.
FROM python:3.12-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ git make && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE models.yaml ./
COPY scripts/llama_cpp_build.cmake scripts/
COPY llamaspec llamaspec
ARG CMAKE_ARGS=
RUN python -m venv /venv \
    && CMAKE_ARGS="-DLLAVA_BUILD=OFF -DCMAKE_PROJECT_llama_cpp_INCLUDE=/src/scripts/llama_cpp_build.cmake $CMAKE_ARGS" \
        /venv/bin/pip install --no-cache-dir --no-binary llama-cpp-python '.[serve]'

FROM python:3.12-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 llamaspec && install -d -o llamaspec -g llamaspec /models
COPY --from=build /venv /venv
USER 1000
# What is fetched and measured stays in the volume, too.
ENV PATH=/venv/bin:$PATH HF_HOME=/models/hub LLAMASPEC_CACHE=/models/cache
WORKDIR /models
VOLUME /models
EXPOSE 8080
HEALTHCHECK --start-period=5m \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8080/health', timeout=5)"]
ENTRYPOINT ["llamaspec", "serve", "--host", "0.0.0.0"]
