# Sourced by the scripts beside it: makes .venv once, with the extras asked for, and puts it on PATH.
#   make_venv local,dev
#   PYTHON          another python than python3
#   TORCH_OPTIONS   of `pip install torch`: what PyPI has brings CUDA, gigabytes that only a GPU needs. For the build without:
#                   TORCH_OPTIONS="--extra-index-url https://download.pytorch.org/whl/cpu"
# Repeating costs nothing: a stamp holds the hash of what was installed.

check_machine() { # there are packages for this python here
    "$1" - <<'CHECK' || exit 1
import platform, sys

if not (3, 11) <= sys.version_info[:2] <= (3, 12):
    sys.exit(f"glmspec needs Python 3.11 or 3.12 and {sys.executable} is {platform.python_version()}. "
             "Set PYTHON to another one.")
if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    sys.exit(f"glmspec needs Linux on x86-64 and this is {platform.system()} on {platform.machine()}.")
name, version = platform.libc_ver()
if name != "glibc" or tuple(map(int, version.split("."))) < (2, 35):
    sys.exit(f"The tritonserver that glmspec installs needs glibc 2.35 or newer, as Ubuntu 22.04 and Debian 12 have, and "
             f"here is {name or 'another C library'} {version}.")
CHECK
}

make_venv() {
    local extras=$1 root python stamp want extra installed
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    python=${PYTHON:-python3}
    cd "$root"
    check_machine "$python"
    stamp=.venv/installed # a line an extra: its name, and the hash of what it was installed from
    want=$({ cat pyproject.toml constraints.txt; "$python" -c 'import sys; print(sys.version)'; } | sha256sum | cut -d' ' -f1)
    for extra in ${extras//,/ }; do
        if ! grep -qxF "$extra $want" "$stamp" 2>/dev/null; then
            echo "Installing glmspec[$extras] into .venv (some minutes)" >&2
            [ -x .venv/bin/python ] || "$python" -m venv .venv
            # torch first, alone: only it is to be looked for where TORCH_OPTIONS says.
            # shellcheck disable=SC2086
            .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch ${TORCH_OPTIONS:-}
            .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]"
            for installed in ${extras//,/ }; do echo "$installed $want" >>"$stamp"; done
            break
        fi
    done
    export PATH="$root/.venv/bin:$PATH"
}
