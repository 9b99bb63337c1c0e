# Sourced by the scripts beside it: makes .venv once, with the extras asked for, and puts it on PATH.
#   make_venv local,dev
# Repeating costs nothing: a stamp holds the hash of what was installed.

make_venv() {
    local extras=$1 root python stamp want extra installed
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    python=${PYTHON:-python3}
    cd "$root"
    if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
        echo "glmspec needs Python 3.11 to 3.13 and $python is $("$python" --version). Set PYTHON to another one." >&2
        exit 1
    fi
    stamp=.venv/installed # a line an extra: its name, and the hash of what it was installed from
    want=$({ cat pyproject.toml constraints.txt; "$python" -c 'import sys; print(sys.version)'; } | sha256sum | cut -d' ' -f1)
    for extra in ${extras//,/ }; do
        if ! grep -qxF "$extra $want" "$stamp" 2>/dev/null; then
            echo "Installing glmspec[$extras] into .venv (a minute or two)" >&2
            [ -x .venv/bin/python ] || "$python" -m venv .venv
            # torch first and pinned: a plain "torch" would pull gigabytes of CUDA libraries.
            .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
            .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]"
            for installed in ${extras//,/ }; do echo "$installed $want" >>"$stamp"; done
            break
        fi
    done
    export PATH="$root/.venv/bin:$PATH"
}
