#!/bin/sh
# Exports the example checkpoints and runs them in serving stacks: onnxruntime-genai, Optimum, Triton's configuration parser, Ray, KServe's
# Python server and, where there is npm, transformers.js. tools runs optimisers and converters on them, and compares with docs/hosts.md; java
# compiles the example, where there are npm and javac; web draws digits on examples/web, where there are npm and Chromium; serve calls
# `moh-run serve`, and lm-eval measures a model that it serves. Takes 8 GB of Python and npm packages; ci/test.sh does not run it.
#
# usage: ci/stacks.sh [serve] [lm-eval] [genai] [triton] [optimum] [transformers.js] [web] [tools] [java] [ray] [kserve]     (default: all these)
#        ci/stacks.sh serve-load
#
# serve-load measures `moh-run serve` with a model of 1.2 billion parameters, beside onnxruntime-genai and llama.cpp's server: half an hour on
# two cores that do nothing else, and 4 GB in target/serve-load, where the models stay.
#
# Prints a line a check; exits with 1 if one failed.
#
# MOH_BIN           the folder of moh-export, moh-run  (target/release)
# MOH_OPS_LIBRARY   the library                      ($MOH_BIN/libmoh_ops.so)
# MOH_STACKS        the folder of the environments   (target/stacks)
# CHROMIUM          the browser                      (/usr/bin/chromium)
# MOH_PICTURES      where web writes screenshots     (nowhere)
# PYTHON            Python 3.11 or newer             (python3)
# MOH_LOAD_SECONDS  of the load test of the server   (60)
# MOH_MEASURE       put before each measurement      (nothing)
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
bin=${MOH_BIN:-$(realpath -m "${CARGO_TARGET_DIR:-$root/target}")/release}
ops=${MOH_OPS_LIBRARY:-$bin/libmoh_ops.so}
envs=${MOH_STACKS:-$root/target/stacks}
python=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1

for file in "$bin/moh-export" "$bin/moh-run" "$ops"; do
    [ -e "$file" ] || { echo "stacks: no $file: run 'cargo build --release', or set MOH_BIN and MOH_OPS_LIBRARY" >&2; exit 2; }
done
bin=$(realpath "$bin") ops=$(realpath "$ops")
[ $# -gt 0 ] || set -- serve lm-eval genai triton optimum transformers.js web tools java ray kserve

# environment NAME PACKAGE...: makes a Python environment, once.
environment() {
    name=$1
    shift
    if [ ! -f "$envs/$name/complete" ]; then
        "$python" -m venv "$envs/$name"
        "$envs/$name/bin/pip" install --quiet "$@"
        touch "$envs/$name/complete"
    fi
}
# run SCRIPT ARGUMENT...: what it says on standard error only matters where it fails.
run() {
    script=$1
    shift
    "$envs/$env/bin/python" "$root/ci/stacks/$script" "$@" 2>"$work/errors" || { status=1; cat "$work/errors" >&2; }
}

mkdir -p "$envs"
envs=$(realpath "$envs")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0
checkpoints=$root/examples/checkpoints
export_to() { "$bin/moh-export" --quiet "$@"; }

# These do without the models of the others.
others=
for stack in "$@"; do
    case $stack in
    tools)
        env=tools
        environment tools onnxruntime==1.31.1 onnx==1.23.2 onnxslim==0.1.98 onnxsim==0.8.1 onnxconverter-common==1.16.0 sympy
        run tools.py "$bin/moh-export" "$ops" "$work/tools" --check "$root/docs/hosts.md"
        ;;
    java)
        if ! command -v npm >/dev/null || ! command -v javac >/dev/null; then
            echo "skip java: no npm or no javac"
            continue
        fi
        # Unity's package has onnxruntime's for Android, and that the Java classes.
        if [ ! -f "$envs/java/classes.jar" ]; then
            rm -rf "$envs/java"
            mkdir -p "$envs/java"
            (cd "$envs/java" && npm pack --silent com.github.asus4.onnxruntime@0.4.9 &&
                tar -xzf com.github.asus4.onnxruntime-0.4.9.tgz --strip-components 3 package/Plugins/Android/onnxruntime.aar &&
                "$python" -m zipfile -e onnxruntime.aar classes && mv classes/classes.jar . &&
                rm -r classes onnxruntime.aar com.github.asus4.onnxruntime-0.4.9.tgz) >&2
        fi
        if javac -Xlint:all -Werror -d "$work/java" -cp "$envs/java/classes.jar" "$root/examples/java/Main.java"; then
            echo "ok   java: examples/java compiles"
        else
            status=1
        fi
        ;;
    web)
        if ! command -v npm >/dev/null || ! [ -x "${CHROMIUM:-/usr/bin/chromium}" ]; then
            echo "skip web: no npm or no chromium"
            continue
        fi
        web=$(sed -n 's/.*"onnxruntime-web": "\(.*\)".*/\1/p' "$root/examples/web/package.json")
        if [ ! -f "$envs/web/complete-$web" ]; then
            mkdir -p "$envs/web"
            (cd "$envs/web" && npm init -y && ONNXRUNTIME_NODE_INSTALL=skip npm install --silent "onnxruntime-web@$web" \
                "onnxruntime-node@$web" playwright-core@1.65.1) >&2
            touch "$envs/web/complete-$web"
        fi
        export_to "$checkpoints/digits-moh-vit" -o "$work/web-vit/model.onnx" --for web --dtype f32 --output-gates
        export_to "$checkpoints/shakespeare-moh-llama" -o "$work/web-llama/model.onnx" --for web --dtype f32
        node "$root/ci/stacks/check_web.mjs" "$envs/web" "$work/web-vit" "$work/web-llama" ${MOH_PICTURES:+"$MOH_PICTURES"} || status=1
        ;;
    serve-load)
        environment genai onnxruntime==1.31.1 onnxruntime-genai==0.18.0 'tritonclient[grpc]' tokenizers numpy pillow safetensors
        environment llama-cpp xllamacpp==2026.10.11549 gguf==0.19.0
        ORT_DYLIB_PATH=${ORT_DYLIB_PATH:-$("$root/ci/fetch-onnxruntime.sh" "$root/target/onnxruntime")}
        export ORT_DYLIB_PATH MOH_OPS_LIBRARY="$ops"
        models=$root/target/serve-load
        load() { # ENVIRONMENT ARGUMENT...
            python_of=$envs/$1/bin/python
            shift
            ${MOH_MEASURE:-} "$python_of" "$root/ci/stacks/serve_load.py" "$@" || status=1
        }
        MOH_MEASURE='' load llama-cpp make "$models" --export "$bin/moh-export" --gguf >&2
        for runtime in ort tract; do
            load llama-cpp server "$models" --run "$bin/moh-run" --runtime $runtime
            load llama-cpp batch "$models" --run "$bin/moh-run" --runtime $runtime
        done
        load genai genai "$models" --ops "$ops"
        load llama-cpp llama.cpp "$models"
        ;;
    lm-eval)
        env=lm-eval
        environment lm-eval 'lm_eval[api]==0.4.13' transformers==5.24.0 onnxruntime==1.31.1
        export_to "$checkpoints/shakespeare-moh-llama" -o "$work/lm-eval/served/model.onnx" --cache in-place
        export_to "$checkpoints/shakespeare-moh-llama" -o "$work/lm-eval/plain/model.onnx" --cache concat
        run check_lm_eval.py "$bin/moh-run" "$work/lm-eval/served" "$work/lm-eval/plain"
        ;;
    ray)
        env=ray
        environment ray -r "$root/examples/ray/requirements.txt" requests==2.34.2
        export_to "$checkpoints/shakespeare-moh-llama" -o "$work/ray/llama/model.onnx"
        export_to "$checkpoints/digits-moh-vit" -o "$work/ray/vit/model.onnx"
        run check_ray.py "$work/ray/llama" "$work/ray/vit"
        run check_ray.py "$work/ray/llama" "$work/ray/vit" "$ops"
        ;;
    kserve)
        env=kserve
        environment kserve kserve==0.21.0 onnxruntime==1.31.1 pillow==13.0.0 requests==2.34.2 safetensors==0.8.0
        export_to "$checkpoints/digits-moh-vit" -o "$work/kserve/model.onnx"
        run check_kserve.py "$work/kserve"
        run check_kserve.py "$work/kserve" "$ops"
        ;;
    *) others="$others $stack" ;;
    esac
done
# shellcheck disable=SC2086 # a list
set -- $others
[ $# -gt 0 ] || exit $status

export_to "$checkpoints/shakespeare-moh-llama" -o "$work/llama/model.onnx" --layout onnx
export_to "$checkpoints/shakespeare-moh-llama" -o "$work/llama-flat/model.onnx"
export_to "$checkpoints/shakespeare-moh-llama" -o "$work/llama-library/model.onnx" --layout onnx --with-library "$ops"
export_to "$checkpoints/shakespeare-moh-llama" -o "$work/llama-f16/model.onnx" --dtype f16
export_to "$checkpoints/shakespeare-moh-llama" -o "$work/llama-in-place/model.onnx" --cache in-place
export_to "$checkpoints/shakespeare-moh-llama" -o "$work/llama-in-place-library/model.onnx" --cache in-place --with-library "$ops"
export_to "$checkpoints/digits-moh-vit" -o "$work/vit/model.onnx"
# transformers.js gives every model float32 pictures.
export_to "$checkpoints/digits-moh-vit" -o "$work/vit-f32/model.onnx" --layout onnx --dtype f32
export_to "$checkpoints/digits-moh-dit" -o "$work/dit/model.onnx"
cat >"$work/moa.json" <<'JSON'
{"family": "moa", "encoder_layers": 2, "decoder_layers": 2, "encoder_embed_dim": 64, "decoder_embed_dim": 64, "head_dim": 32,
 "encoder_ffn_embed_dim": 128, "decoder_ffn_embed_dim": 128, "num_expert": 6, "encoder_attention_heads": 2,
 "decoder_attention_heads": 2, "vocab_size": 300, "share_all_embeddings": true, "max_target_positions": 128}
JSON
"$bin/moh-export" random "$work/moa.json" -o "$work/moa-weights" >"$work/said"
for model in shakespeare-moh-llama digits-moh-vit digits-moh-dit; do
    export_to "$checkpoints/$model" --triton "$work/repository/$model" --with-library /opt/moh/libmoh_ops.so
done

environment genai onnxruntime==1.31.1 onnxruntime-genai==0.18.0 'tritonclient[grpc]' tokenizers numpy pillow safetensors
"$envs/genai/bin/python" "$root/ci/stacks/spread_weights.py" "$work/moa-weights/model.safetensors" 8
export_to "$work/moa-weights" -o "$work/moa" --part both
for part in encoder decoder; do
    export_to "$work/moa-weights" -o "$work/moa-parts/$part.onnx" --part $part
done

for stack in "$@"; do
    case $stack in
    genai | triton) env=genai ;;
    serve)
        env=serve
        environment serve openai==3.54.0 'tritonclient[http,grpc]==2.73.0' numpy pillow safetensors
        ;;
    optimum)
        env=optimum
        environment optimum torch optimum==2.1.0 optimum-onnx==0.1.0 transformers==4.57.6 onnxruntime==1.31.1 pillow \
            safetensors
        ;;
    esac
    case $stack in
    genai)
        run check_genai.py "$work/llama" "$work/llama-flat" "$work/llama-library" "$work/llama-f16" \
            "$work/llama-in-place" "$work/llama-in-place-library"
        run check_genai_engine.py "$work/llama-in-place" "$work/llama-in-place-library"
        for folder in llama llama-library llama-f16; do
            run run_card.py "$work/$folder" Python onnxruntime-genai
        done
        run run_card.py "$work/vit" Python
        run run_card.py "$work/dit" Python
        run run_card.py "$work/moa-parts" Python
        ;;
    serve)
        cp -r "$work/llama-in-place" "$work/chat"
        cp "$root/ci/stacks/chat_tokenizer_config.json" "$work/chat/tokenizer_config.json"
        run serve.py "$bin/moh-run" "$work/llama-in-place" "$work/chat" "$work/vit" --seconds "${MOH_LOAD_SECONDS:-60}"
        ;;
    triton) run check_triton.py "$work/repository" ;;
    optimum)
        run check_optimum.py --llama "$work/llama" --llama "$work/llama-flat" --vit "$work/vit" --vit "$work/vit-f32" \
            --moa "$work/moa" "$work/moa-parts"
        run check_optimum.py --library "$ops" --llama "$work/llama" --vit "$work/vit-f32" --moa "$work/moa" "$work/moa-parts"
        for folder in llama llama-flat vit vit-f32; do
            run run_card.py "$work/$folder" Optimum
        done
        ;;
    transformers.js)
        if ! command -v npm >/dev/null; then
            echo "skip transformers.js: no npm"
            continue
        fi
        if [ ! -f "$envs/node/complete" ]; then
            mkdir -p "$envs/node"
            (cd "$envs/node" && npm init -y && ONNXRUNTIME_NODE_INSTALL=skip npm install --silent @huggingface/transformers@4.3.1) >&2
            touch "$envs/node/complete"
        fi
        node "$root/ci/stacks/check_transformers.mjs" "$envs/node" "$work/llama" "$work/vit-f32" || status=1
        ;;
    *)
        echo "stacks: no stack $stack" >&2
        exit 2
        ;;
    esac
done
exit $status
