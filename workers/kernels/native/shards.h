// The memory nodes that a model is spread over. A shard is the cores of a node, the threads that run on them, and what these read: a range of the outputs of every
// matrix, and the keys and values of some heads.
//
// No sum is divided: an output is computed by one thread from all of the inputs, so that no byte depends on the shards. What crosses from node to node are
// activations. Threads, and with them all that is divided, go to shards in proportion to their cores.
#pragma once

#include "kernels.h"

#include <cstdint>

namespace dovetail {

constexpr int MOST_SHARDS = 16;

struct ShardCores {
    const int32_t* cores;
    int32_t count;
    int32_t node;  // whose memory the shard has; -1: that which its cores are given when they touch it
};

// From now on there are these shards, none: all is undivided. 0, or the errno by which the kernel refused cores of one; nothing has changed then.
int declare_shards(const ShardCores* shards, int count);

// The pool has so many threads from now on.
void divide_threads(int threads);

int shards();               // 1: all is undivided
int first_part(int shard);  // the parts of shard s are first_part(s) .. first_part(s + 1) - 1
int shard_of(int part);
int64_t share_begin(int64_t n, int shard);  // likewise of n units

// Keep the calling thread on the cores of the shard of a part, where there are shards; 0 or an errno.
int settle(int part);

// Units of `bytes` bytes one behind the other, first .. first + count - 1 of `all` that shards divide among themselves, in each of `items` pieces of memory
// `stride` bytes apart. Of each unit the first `used` bytes are used. The last one may be shorter: the units of a piece end at `end`, if that is not 0.
struct Spread {
    char* start;
    int64_t items, stride, all, first, count, bytes, used, end;
};

// Fresh memory becomes zeros, each page in the memory of the node whose shard has most of it. `page`: bytes of the pages that the kernel may give.
void spread(const Spread& memory, int64_t page);

// The same of the matrices at `matrix`, and as long again `stride` bytes behind it, `items` times.
void spread_matrices(const Matrix& matrix, int64_t items, int64_t stride, int64_t page);

// Of the pages that were spread so far some were looked for: how many, and how many of them lie on their node. `refused`: the errno by which the kernel refused a
// policy of memory, 0: it did not.
struct Placed {
    int64_t looked, home;
    int32_t refused, reserved;
};
Placed placed();

}  // namespace dovetail
