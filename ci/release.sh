#!/usr/bin/env bash
# Builds what a release consists of: for each processor a wheel, a tarball of the programs and the library, and a list of what they consist
# of (CycloneDX; the wheel holds it too); and the SHA-256 sums of all.
#
# usage: ci/release.sh OUT [x86_64] [aarch64]      (default: both)
#
# OUT has to be empty or absent. Builds the commit that is checked out; changes that are not committed are an error. Needs what
# ci/wheel.sh needs; for the other processor `rustup target add aarch64-unknown-linux-gnu`.
set -euo pipefail

fail() {
    echo "release: $*" >&2
    exit 1
}
[[ $# -gt 0 ]] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2 && exit 2; }
mkdir -p "$1"
out=$(realpath "$1")
shift
cd "$(dirname "$0")/.."
[[ $# -gt 0 ]] || set -- x86_64 aarch64
[[ -z $(ls -A "$out") ]] || fail "$out: not empty"
[[ -z $(git status --porcelain) ]] || fail "there are changes that are not committed, and programs name their commit: commit or stash them"

version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"$/\1/p' Cargo.toml)
date=@$(git log -1 --format=%ct)
MOH_WHEELS=$out ci/wheel.sh "$@" >&2

target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
# Manual pages and completions are the same for every processor, and written by programs that run here.
host=$target/$(uname -m)-unknown-linux-gnu/dist
if [[ " $* " != *" $(uname -m) "* ]]; then
    cargo build --profile dist --locked --package moh-export --package moh-run >&2
    host=$target/dist
fi
for processor in "$@"; do
    name=moh-$version-$processor-linux
    folder=target/release-files/$name
    rm -rf "$folder"
    mkdir -p "$folder"
    built=$target/$processor-unknown-linux-gnu/dist
    install -m 755 "$built/moh-export" "$built/moh-run" "$built/libmoh_ops.so" "$folder"
    install -m 644 LICENSE README.md CHANGELOG.md "$built/THIRD-PARTY-LICENCES.txt" "$folder"
    for file in moh-export moh-run libmoh_ops.so; do
        [[ $(readelf --sections "$folder/$file") != *.symtab* ]] || fail "$folder/$file: not stripped"
    done
    install -m 644 "$built/moh.cdx.json" "$out/$name.cdx.json"
    mkdir -p "$folder/man" "$folder/completions"
    for program in moh-export moh-run; do
        "$host/$program" man "$folder/man" >/dev/null
        for shell in bash zsh fish; do
            "$host/$program" completions "$shell" >"$folder/completions/$program.$shell"
        done
    done
    # The same commit gives the same tarball.
    tar --sort=name --mtime="$date" --mode=u=rwX,go=rX --owner=0 --group=0 --numeric-owner -C target/release-files -cf - "$name" | gzip -9n >"$out/$name.tar.gz"
done

for wheel in "$out"/*.whl; do
    # 30 MB.
    [[ $(stat -c %s "$wheel") -lt 30000000 ]] || fail "$wheel: $(stat -c %s "$wheel") bytes, expected less than 30000000"
done
(cd "$out" && sha256sum -- *.whl *.tar.gz *.cdx.json >SHA256SUMS && cat SHA256SUMS)
