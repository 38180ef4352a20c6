// Kernels for tests of the emulator and of what kernels share; not part of the images for GPUs.

#include "tiles.cuh"

namespace {

struct ListTiles {
    TileParams tiles;
    int4* out; // [number of tiles]
};

struct Word {
    int32_t* word;
};

} // namespace

// Writes the tiles that block b of a persistent kernel would take, if blocks took turns: numbers b, b + gridDim.x, ...
MOH_KERNEL(moh_test_tiles, ListTiles, 32, 1) {
    wait_for_previous_kernel();
    TileSearch search;
    for (int index = int(blockIdx.x);; index += int(gridDim.x)) {
        const int4 tile = find_tile(p.tiles, search, index);
        if (tile.z == 0) return;
        if (threadIdx.x == 0) p.out[index] = tile;
    }
}

// Correct: the last thread waits, and the others wait for it.
MOH_KERNEL(moh_test_waits, Word, 128, 1) {
    if (threadIdx.x == 127) wait_for_previous_kernel();
    __syncthreads();
    if (threadIdx.x == 0) *p.word += 1;
}

// Faults: an access of a thread that has not waited, and a block that ends without waiting.
MOH_KERNEL(moh_test_reads_early, Word, 128, 1) {
    if (threadIdx.x == 127) wait_for_previous_kernel();
    if (threadIdx.x == 0) *p.word += 1;
}
MOH_KERNEL(moh_test_never_waits, Word, 128, 1) {}
