#!/usr/bin/env bash
# Builds flexpte into .venv/ at the root of the repository, installing what is missing:
# system packages (apt on Debian and Ubuntu, Homebrew on macOS), then Python packages, then the C++ parts.
# Safe to run again: only what changed is built.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\n== %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

install_system_packages() {
  case "$(uname -s)" in
    Linux)
      command -v apt-get >/dev/null || {
        printf 'setup: no apt-get here; needed: a C++20 compiler, Highway, flatbuffers, GoogleTest, Python 3.11 with venv\n'
        return
      }
      local wanted=(g++ libhwy-dev flatbuffers-compiler libflatbuffers-dev libgtest-dev clang-format unzip) missing=()
      # Runs Metal kernels on this machine (device "msl-host").
      command -v clang++-19 >/dev/null || command -v clang++-20 >/dev/null || wanted+=(clang-19)
      # A Python of another origin (pyenv, uv) brings its own headers and venv module.
      python_is_complete || wanted+=(python3 python3-dev python3-venv)
      for package in "${wanted[@]}"; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
      done
      [ ${#missing[@]} -eq 0 ] && return
      say "installing system packages: ${missing[*]}"
      local as_root=()
      if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || fail "run as root, or install: ${missing[*]}"
        as_root=(sudo)
      fi
      "${as_root[@]}" apt-get update -qq
      DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq "${missing[@]}" >/dev/null
      ;;
    Darwin)
      command -v brew >/dev/null || fail "Homebrew is needed: see https://brew.sh"
      local formula
      for formula in highway flatbuffers googletest clang-format; do
        brew list --formula "$formula" >/dev/null 2>&1 || brew install "$formula"
      done
      find_python >/dev/null || brew install python@3.11
      ;;
    *) fail "unsupported system $(uname -s): Linux and macOS only" ;;
  esac
}

# A Python >= 3.11, the lowest first: wheels of the pinned packages exist for it.
find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$candidate"; return; }
  done
  return 1
}

python_is_complete() {
  local python
  python=$(find_python) && "$python" -c '
import os, sysconfig, ensurepip, venv
assert os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))' 2>/dev/null
}

install_system_packages
python=$(find_python) || fail "Python 3.11 or later is needed; set PYTHON=/path/to/python3.11"
[ -x .venv/bin/python ] || { say "creating .venv with $("$python" --version)"; "$python" -m venv .venv; }
venv_python=$PWD/.venv/bin/python

# Python packages, again only when pyproject.toml has changed.
stamp=.venv/.packages
if ! cmp -s pyproject.toml "$stamp"; then
  say "installing Python packages (torch and executorch are large: this takes minutes the first time)"
  "$venv_python" -m pip install --quiet --upgrade pip
  "$venv_python" scripts/requirements.py build export test dev >.venv/requirements.txt
  "$venv_python" -m pip install --quiet -r .venv/requirements.txt
  cp pyproject.toml "$stamp"
fi

# Apple's metal-cpp headers: the device "metal" on a Mac, and its test double elsewhere.
metal_cpp=$("$venv_python" scripts/fetch_metal_cpp.py) || {
  [ "$(uname -s)" = Darwin ] && fail "the headers of metal-cpp could not be fetched"
  printf 'setup: without metal-cpp: the host code of device "metal" is not built and not tested\n' >&2
  metal_cpp=
}

say "building flexpte"
"$venv_python" -m pip install --quiet --no-build-isolation --no-deps --editable . \
  --config-settings=build-dir=build/release --config-settings=cmake.define.FLEXPTE_TESTS=ON \
  --config-settings=cmake.define.FLEXPTE_METAL_CPP_DIR="$metal_cpp"
echo "ready: .venv/bin/flexpte"
