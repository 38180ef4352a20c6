// The functions of cuBLASLt that src/cublaslt.rs uses, on the emulated GPU: products are queued on the stream like kernels. Loops, with the
// numbers of `cublasLt.h` written out again. Like the library it has no way for some products: here those whose columns do not fill 8 bytes.
//
// With MOH_EMULATOR_LOG, a product is a line there, as a kernel without threads.

#include "device.cuh"
#include "streams.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
enum { SUCCESS = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { R_32F = 0, R_16F = 2, R_16BF = 14 };
constexpr size_t workspace_bytes = 1000;

struct Description {
    int compute = 0, scale = 0;
    unsigned epilogue = 1;
    const void* bias = nullptr;
};
// Column by column: element (i, j) is number i + j * ld.
struct Layout {
    int type;
    uint64_t rows, columns;
    int64_t ld;
};
struct Preference {
    size_t workspace = 0;
    uint32_t reductions = 7;
    uint32_t aligned[4] = {256, 256, 256, 256};
};
struct Choice {
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};
constexpr uint64_t chosen = 0x6d6f68; // marks an algorithm of this file

float load(const void* at, int64_t i, int type) {
    switch (type) {
    case R_16F: return to_float(static_cast<const f16*>(at)[i]);
    case R_16BF: return to_float(static_cast<const bf16*>(at)[i]);
    default: return static_cast<const float*>(at)[i];
    }
}
void store(void* at, int64_t i, int type, float x) {
    switch (type) {
    case R_16F: static_cast<f16*>(at)[i] = from_float<f16>(x); break;
    case R_16BF: static_cast<bf16*>(at)[i] = from_float<bf16>(x); break;
    default: static_cast<float*>(at)[i] = x;
    }
}
size_t size_of(int type) { return type == R_32F ? 4 : 2; }

template <class T> int set(T& field, const void* value, size_t bytes) {
    if (bytes != sizeof(T)) return INVALID_VALUE;
    memcpy(&field, value, bytes);
    return SUCCESS;
}
} // namespace

EXPORT int cublasLtCreate(void** handle) { return *handle = new int(0), SUCCESS; }
EXPORT int cublasLtMatmulDescCreate(void** at, int compute, int scale) {
    if (compute != 68 || scale != R_32F) return NOT_SUPPORTED;
    return *at = new Description{compute, scale}, SUCCESS;
}
EXPORT int cublasLtMatmulDescDestroy(void* at) { return delete static_cast<Description*>(at), SUCCESS; }
EXPORT int cublasLtMatmulDescSetAttribute(void* at, int attribute, const void* value, size_t bytes) {
    Description& description = *static_cast<Description*>(at);
    switch (attribute) {
    case 7: return set(description.epilogue, value, bytes);
    case 8: return set(description.bias, value, bytes);
    default: return INVALID_VALUE;
    }
}
EXPORT int cublasLtMatrixLayoutCreate(void** at, int type, uint64_t rows, uint64_t columns, int64_t ld) {
    if (type != R_32F && type != R_16F && type != R_16BF) return NOT_SUPPORTED;
    return *at = new Layout{type, rows, columns, ld}, SUCCESS;
}
EXPORT int cublasLtMatrixLayoutDestroy(void* at) { return delete static_cast<Layout*>(at), SUCCESS; }
EXPORT int cublasLtMatmulPreferenceCreate(void** at) { return *at = new Preference, SUCCESS; }
EXPORT int cublasLtMatmulPreferenceDestroy(void* at) { return delete static_cast<Preference*>(at), SUCCESS; }
EXPORT int cublasLtMatmulPreferenceSetAttribute(void* at, int attribute, const void* value, size_t bytes) {
    Preference& preference = *static_cast<Preference*>(at);
    if (attribute == 1) return set(preference.workspace, value, bytes);
    if (attribute == 3) return set(preference.reductions, value, bytes);
    return attribute >= 5 && attribute < 9 ? set(preference.aligned[attribute - 5], value, bytes) : INVALID_VALUE;
}

EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void* output, void* preference, int most, Choice* choices,
                                          int* found) {
    const Layout& d = *static_cast<Layout*>(output);
    const Preference& wanted = *static_cast<Preference*>(preference);
    *found = 0;
    if (most < 1 || d.rows * size_of(d.type) % 8 || wanted.reductions != 2 || wanted.workspace < workspace_bytes) return NOT_SUPPORTED;
    *choices = {};
    choices->algorithm[0] = chosen;
    for (int i = 0; i < 4; i++) choices->algorithm[1 + i] = wanted.aligned[i];
    choices->workspace = workspace_bytes;
    return *found = 1, SUCCESS;
}

EXPORT int cublasLtMatmul(void*, void* description, const float* alpha, const void* a, void* a_layout, const void* b, void* b_layout,
                          const float* beta, const void* c, void* c_layout, void* d, void* d_layout, const uint64_t* algorithm, void* workspace,
                          size_t bytes, void* stream) {
    const Description of = *static_cast<Description*>(description);
    const Layout first = *static_cast<Layout*>(a_layout), second = *static_cast<Layout*>(b_layout);
    const Layout added = *static_cast<Layout*>(c_layout), output = *static_cast<Layout*>(d_layout);
    const uint64_t depth = first.columns, rows = first.rows;
    const bool fits = rows == output.rows && depth == second.rows && second.columns == output.columns && added.rows == output.rows &&
                      added.columns == output.columns;
    if (algorithm[0] != chosen || bytes < workspace_bytes || !workspace || !fits) return INVALID_VALUE;
    const void* pointers[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++)
        if (uintptr_t(pointers[i]) % algorithm[1 + i]) return INVALID_VALUE;
    switch (of.epilogue) { // none, bias, ReLU, GELU, and these with a bias
    case 1: case 2: case 32: break;
    case 4: case 6: case 36:
        if (of.bias) break;
        [[fallthrough]];
    default: return INVALID_VALUE;
    }
    const bool has_bias = of.epilogue & 4;
    if (const char* log = getenv("MOH_EMULATOR_LOG")) {
        FILE* file = fopen(log, "a");
        if (!file) return INVALID_VALUE;
        fprintf(file, "cublasLtMatmul_%u%s\t0\t0\n", of.epilogue, *beta != 0.0f ? "_added" : "");
        fclose(file);
    }
    return simt::queue(stream, [=, scale = *alpha, factor = *beta] {
        memset(workspace, 0xff, workspace_bytes);
        for (uint64_t j = 0; j < output.columns; j++)
            for (uint64_t i = 0; i < output.rows; i++) {
                float sum = 0.0f;
                for (uint64_t k = 0; k < depth; k++) {
                    const int64_t at = int64_t(i) + int64_t(k) * first.ld;
                    sum = fmaf(load(a, at, first.type), load(b, int64_t(k) + int64_t(j) * second.ld, second.type), sum);
                }
                sum *= scale;
                if (factor != 0.0f) sum += factor * load(c, int64_t(i) + int64_t(j) * added.ld, added.type);
                if (has_bias) sum += load(of.bias, int64_t(i), output.type);
                if (of.epilogue & 2) sum = fmaxf(sum, 0.0f);
                if (of.epilogue & 32) sum = 0.5f * sum * (1.0f + tanhf(0.7978845608f * (sum + 0.044715f * sum * sum * sum)));
                store(d, int64_t(i) + int64_t(j) * output.ld, output.type, sum);
            }
    });
}
