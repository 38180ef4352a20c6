#!/usr/bin/env bash
# Format, lints, documentation, dependencies, spelling. What passes here passes in CI.
#
# Needs Rust with rustfmt and clippy. typos and cargo-deny are taken from the PATH, or put into target/tools once: typos by
# pip, cargo-deny by cargo, which takes some minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

tools=$PWD/target/tools
export PATH=$PATH:$tools/cargo/bin:$tools/pip/bin PIP_DISABLE_PIP_VERSION_CHECK=1

step() { printf '\n== %s (after %d:%02d minutes)\n' "$*" $((SECONDS / 60)) $((SECONDS % 60)); }

step "format"
# Every file by name: cargo fmt does not see modules that a macro declares, such as operators and passes.
git ls-files -z '*.rs' | xargs -0 rustfmt --edition 2024 --check

# The release profile, because ci/test.sh uses it: procedural macros and build scripts are compiled once for both.
step "clippy"
cargo clippy --release --locked --workspace --all-targets -- -D warnings

step "clippy, CUDA"
if ci/cuda-toolchain.sh; then
    cargo clippy --release --locked -p moh-cuda -p moh-ops --features moh-cuda/kernels,moh-ops/cuda --all-targets -- -D warnings
else
    echo "note: no CUDA compiler: this is left out" >&2
fi

step "documentation"
RUSTDOCFLAGS="-D warnings" cargo doc --release --locked --workspace --no-deps --quiet

step "which crate uses which"
ci/layers.py

step "faults to plant"
if python3 -c 'import tomllib' 2>/dev/null; then
    ci/faults/faults.py check
else
    echo "note: needs Python 3.11: ci/faults is not checked" >&2
fi

step "dependencies"
if ! command -v cargo-deny >/dev/null; then
    # Not for speed: it runs for seconds.
    CARGO_PROFILE_DEV_DEBUG=0 cargo install cargo-deny --version 0.20.2 --locked --quiet --debug --root "$tools/cargo"
fi
cargo deny --locked --log-level error check bans licenses sources
# From GitHub; where that cannot be reached, as it was when it could.
timeout 120 cargo deny --log-level off fetch db >/dev/null 2>&1 || true
if compgen -G "${CARGO_HOME:-$HOME/.cargo}/advisory-dbs/*/crates" >/dev/null; then
    cargo deny --offline --locked --log-level error check advisories
else
    echo "note: no database of advisories: github.com/rustsec/advisory-db cannot be fetched; known vulnerabilities are not looked for" >&2
fi

step "spelling"
if ! command -v typos >/dev/null; then
    if ! python3 -m pip --version >/dev/null 2>&1; then
        echo "error: no typos in the PATH, and no pip to fetch it: install python3 and pip, or typos-cli" >&2
        exit 1
    fi
    python3 -m pip install --quiet --upgrade --target "$tools/pip" typos==1.52.0
fi
typos

printf '\nall checks passed\n'
