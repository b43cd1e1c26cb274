#!/bin/sh
# Makes .venv with the pinned dependencies and the generated stubs. Safe to repeat:
# the stamp names what was installed, and a change of it installs again.
set -eu
cd "$(dirname "$0")/.."

find_python() {
    for name in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "setup: Python 3.11 or newer is needed (apt-get install python3)" >&2
    exit 1
}

# Debian splits venv and OpenMP's runtime from what a bare system has.
install_debian_packages() {
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@" >/dev/null
    else
        echo "setup: missing Debian packages; run: sudo apt-get install $*" >&2
        return 1
    fi
}

stamp=.venv/.stamp
wanted=$(cat pyproject.toml constraints.txt scripts/setup.sh | sha256sum | cut -d' ' -f1)
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
    python=$(find_python)
    if ! "$python" -c 'import ensurepip' 2>/dev/null; then
        install_debian_packages python3-venv
    fi
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    echo "setup: installing the pinned dependencies into .venv (some minutes the first time)"
    # On a terminal pip shows what it does; elsewhere only what goes wrong.
    quiet=--quiet
    [ -t 1 ] && quiet=
    # torch first and by its exact version: a range would bring a much larger build.
    .venv/bin/pip install $quiet --disable-pip-version-check torch==2.13.0 setuptools \
        --constraint constraints.txt
    mkdir -p gen
    .venv/bin/pip install $quiet --disable-pip-version-check --no-build-isolation \
        --constraint constraints.txt --editable '.[dev]'
    echo "$wanted" >"$stamp"
    rm -f gen/.stamp
fi

protos=$(find protos -name '*.proto' | sort)
wanted=$(cat $protos scripts/setup.sh | sha256sum | cut -d' ' -f1)
if [ ! -f gen/.stamp ] || [ "$(cat gen/.stamp)" != "$wanted" ]; then
    echo "setup: generating stubs into gen/"
    rm -rf gen
    mkdir -p gen
    # Word splitting is wanted: one argument a file.
    .venv/bin/python -m grpc_tools.protoc -Iprotos --python_out=gen --pyi_out=gen \
        --grpc_python_out=gen $(cd protos && find quire -name '*.proto' | sort)
    # The packages are found when the project is installed, so once they exist.
    .venv/bin/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps \
        --editable .
    echo "$wanted" >gen/.stamp
fi
