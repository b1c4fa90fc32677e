// The memory nodes over which a model is spread. A shard is the cores of a node, the threads that run on them, and what these read: a range of the outputs of
// every matrix, and the keys and values of some heads.
//
// No sum is divided: an output is computed by one thread from all of the inputs, so that no byte depends on the shards. Only activations cross from node to
// node. Threads, and with them all that is divided, go to shards in proportion to their cores.
#pragma once

#include "kernels.h"

#include <cstdint>

namespace dovetail {

constexpr int MOST_SHARDS = 16;

struct ShardCores {
    const int32_t* cores;
    int32_t count;
    int32_t node;  // whose memory the shard has; -1: memory that its cores are given when they touch it
};

// Declares these shards; with a count of 0 nothing is divided any more. Returns 0, or the errno with which the system refused cores; then nothing has changed.
int declare_shards(const ShardCores* shards, int count);

// Divides this number of threads, which the pool has from now on, among the shards.
void divide_threads(int threads);

int shards();               // 1: nothing is divided
int first_part(int shard);  // the parts of shard s are first_part(s) .. first_part(s + 1) - 1
int shard_of(int part);
int64_t share_begin(int64_t n, int shard);  // likewise of n units

// Keeps the calling thread on the cores of the shard of a part, if there are shards; returns 0 or an errno.
int settle(int part);

// `items` pieces of memory, `stride` bytes apart. Each has units of `bytes` bytes in a row, first .. first + count - 1 of the `all` units that the shards
// divide among themselves. Of each unit the first `used` bytes are used. The last one may be shorter: the units of a piece end at `end`, if that is not 0.
struct Spread {
    char* start;
    int64_t items, stride, all, first, count, bytes, used, end;
};

// Fills fresh memory with zeros, each page in the memory of the node whose shard has most of it. `page`: the size of the pages that the system may give.
void spread(const Spread& memory, int64_t page);

// The same for `items` matrices, the first of which is `matrix`, `stride` bytes apart.
void spread_matrices(const Matrix& matrix, int64_t items, int64_t stride, int64_t page);

// A sample of the pages that were spread so far: how many were looked at, and how many of them lie on their node. `refused`: the errno with which the system
// refused a memory policy, 0: it did not.
struct Placed {
    int64_t looked, home;
    int32_t refused, reserved;
};
Placed placed();

}  // namespace dovetail
