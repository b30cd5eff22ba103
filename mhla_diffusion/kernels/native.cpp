// The operator for CPUs, forward and backward, in float32: see native.py, which compiles this file and calls it.
//
// A unit is one head of one sample. Its summaries lie one after the other in scratch memory, each a matrix S (D rows of
// E columns, padded to whole vectors) with the normaliser's vector z (D) behind it. They are made from chunks of tokens
// that fit into the first cache, mixed in place, and read out with chunks of queries. Every step is a product of the
// same kind, done by `multiply`, whose inner tiles stay in registers.
//
// Separable mixing goes axis by axis. A slab is all blocks of one index on the first axis: what happens along the other
// axes happens within a slab. With full mixing, which is one factor for all blocks, a slab is one block.

#include <omp.h>

#include "native_worker.hpp"

namespace {

// Calls `work(worker, task, memory)` for `tasks` tasks of each of some units, spread over the threads, and waits for
// all. Each unit has its part of the memory.
template <typename Work>
void for_all(const Call& c, const Sizes& s, int64_t first_unit, int64_t units, int64_t tasks, float* memory,
             int64_t memory_of_unit, float* buffers, Work work) {
    const int64_t thread = omp_get_thread_num();
#pragma omp for schedule(static)
    for (int64_t i = 0; i < units * tasks; ++i) {
        const int64_t unit = first_unit + i / tasks;
        const Worker worker{c, s, buffers + thread * s.buffers, thread, unit / c.heads, unit % c.heads};
        work(worker, i % tasks, memory + i / tasks * memory_of_unit);
    }
}

}  // namespace

int64_t mhla_forward_scratch(const Call* call) {
    const Sizes s(*call, false);
    return s.units * call->blocks * s.summary + call->threads * s.buffers;
}

void mhla_forward(const Call* call) {
    const Call& c = *call;
    const Sizes s(c, false);
    const int64_t memory_of_unit = c.blocks * s.summary, slab_row = s.slab * s.summary;
    float *memory = c.scratch, *buffers = memory + s.units * memory_of_unit;
    const int64_t panels = up(slab_row, panel) / panel;
#pragma omp parallel num_threads(c.threads)
    for (int64_t first = 0; first < c.batch * c.heads; first += s.units) {
        const int64_t units = std::min(s.units, c.batch * c.heads - first);
        auto all = [&](int64_t tasks, auto work) {
            for_all(c, s, first, units, tasks, memory, memory_of_unit, buffers, work);
        };
        all(s.slabs, [&](const Worker& worker, int64_t i, float* summaries) {
            float* slab = summaries + i * slab_row;
            for (int64_t j = 0; j < s.slab; ++j) worker.summarise(i * s.slab + j, slab + j * s.summary);
            worker.mix_behind(0, slab, slab);
        });
        if (c.num_factors > 1) {
            // By columns, the blocks that differ in the first axis only: they are read out while they are in the cache.
            all(s.slab, [&](const Worker& worker, int64_t i, float* summaries) {
                const int64_t begin = i * s.summary, end = begin + s.summary;
                worker.mix(worker.factor(0), s.slabs, summaries, summaries, slab_row, begin, end);
                for (int64_t j = i; j < c.blocks; j += s.slab) worker.read_out(j, summaries + j * s.summary);
            });
            continue;
        }
        all(panels, [&](const Worker& worker, int64_t i, float* summaries) {
            const int64_t begin = i * panel, end = std::min(begin + panel, slab_row);
            worker.mix(worker.factor(0), s.slabs, summaries, summaries, slab_row, begin, end);
        });
        all(c.blocks, [&](const Worker& worker, int64_t block, float* summaries) {
            worker.read_out(block, summaries + block * s.summary);
        });
    }
}

int64_t mhla_backward_scratch(const Call* call) {
    const Sizes s(*call, true);
    return s.units * (2 + (call->num_factors > 1)) * call->blocks * s.summary + call->threads * s.buffers;
}

// Of the forward pass only the denominators are there; the summaries are made anew. What axis a of the mixing was given
// is the summaries mixed along the axes behind it, so that is made once more for each axis.
void mhla_backward(const Call* call) {
    const Call& c = *call;
    const Sizes s(c, true);
    const bool separable = c.num_factors > 1;
    const int64_t of_blocks = c.blocks * s.summary, slab_row = s.slab * s.summary;
    const int64_t memory_of_unit = (2 + separable) * of_blocks;
    float *memory = c.scratch, *buffers = memory + s.units * memory_of_unit;
    const int64_t panels = up(slab_row, panel) / panel, strips = up(slab_row, strip) / strip;
#pragma omp parallel num_threads(c.threads)
    for (int64_t first = 0; first < c.batch * c.heads; first += s.units) {
        const int64_t units = std::min(s.units, c.batch * c.heads - first);
        auto all = [&](int64_t tasks, auto work) {
            for_all(c, s, first, units, tasks, memory, memory_of_unit, buffers, work);
        };
        // What the first axis was given: `given`; it is the summaries themselves where there is one factor only.
        auto grads = [&](float* summaries) { return summaries + of_blocks; };
        auto given = [&](float* summaries) { return summaries + 2 * separable * of_blocks; };
        all(s.slabs, [&](const Worker& worker, int64_t i, float* summaries) {
            float* slab = summaries + i * slab_row;
            for (int64_t j = 0; j < s.slab; ++j) worker.summarise(i * s.slab + j, slab + j * s.summary);
            worker.mix_behind(0, slab, given(summaries) + i * slab_row);
        });
        all(panels, [&](const Worker& worker, int64_t i, float* summaries) {
            const int64_t begin = i * panel, end = std::min(begin + panel, slab_row);
            worker.mix(worker.factor(0), s.slabs, given(summaries), grads(summaries), slab_row, begin, end);
        });
        all(c.blocks, [&](const Worker& worker, int64_t block, float* summaries) {
            worker.read_back(block, grads(summaries) + block * s.summary);
        });
        all(strips, [&](const Worker& worker, int64_t i, float* summaries) {
            const int64_t begin = i * strip, end = std::min(begin + strip, slab_row);
            worker.factor_gradient(0, grads(summaries), given(summaries), slab_row, begin, end);
            worker.mix(worker.transposed_factor(0), s.slabs, grads(summaries), grads(summaries), slab_row, begin, end);
        });
        all(s.slabs, [&](const Worker& worker, int64_t i, float* summaries) {
            float *slab = summaries + i * slab_row, *grad = grads(summaries) + i * slab_row;
            for (int64_t axis = 1; axis < c.num_factors; ++axis) {
                const bool is_last = axis + 1 == c.num_factors;
                float* axis_given = is_last ? slab : given(summaries) + i * slab_row;
                worker.mix_behind(axis, slab, axis_given);
                worker.along(axis, [&](int64_t offset, int64_t row) {
                    float* made = grad + offset;
                    worker.factor_gradient(axis, made, axis_given + offset, row, 0, row);
                    worker.mix(worker.transposed_factor(axis), c.counts[axis], made, made, row, 0, row);
                });
            }
            for (int64_t j = 0; j < s.slab; ++j) worker.summarise_back(i * s.slab + j, grad + j * s.summary);
        });
    }
}
