// The operator for CPUs, forward and backward, in float32: see native.py, which compiles this file and calls it.
//
// A unit is a group of neighbouring heads of one sample. The summaries of each head lie one after the other in scratch
// memory: a matrix S (D rows of E columns, padded to whole vectors) with the normaliser's vector z (D) behind it. They
// are made from chunks of tokens that fit into the first cache, mixed in place, and read out with chunks of queries.
// Every step is a product of the same kind, done by `multiply`, whose inner tiles stay in registers.
//
// Separable mixing goes axis by axis. A slab is all blocks of one index on the first axis: what happens along the other
// axes happens within a slab. With full mixing, which is one factor for all blocks, a slab is one block.
//
// The files: native_call.hpp, what is called and with what; native_products.hpp, matrix products; native_worker.hpp,
// the steps, done by one thread; this one, the order of the steps, and how threads share them.

#include <omp.h>

#include "native_worker.hpp"

namespace {

// What all threads do together for some units.
struct Round {
    const Call& c;
    const Sizes& s;
    int64_t first_unit, units;

    // Calls `work(worker, task, memory)` for `tasks` tasks of each unit, spread over the threads, and waits for all.
    template <typename Work>
    void all(int64_t tasks, Work work) const {
        const int64_t thread = omp_get_thread_num(), groups_of_sample = s.groups / c.batch;
        float* buffer = c.scratch + s.units * s.memory + thread * s.buffer;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < units * tasks; ++i) {
            const int64_t unit = first_unit + i / tasks;
            const Worker worker{c, s, buffer, thread, unit / groups_of_sample, unit % groups_of_sample * s.group};
            work(worker, i % tasks, c.scratch + i / tasks * s.memory);
        }
    }

    // The same for each head of each unit: `work(worker, task, memory, head)`, where the memory is that of the head.
    template <typename Work>
    void all_heads(int64_t tasks, Work work) const {
        all(tasks * s.group, [&](const Worker& worker, int64_t i, float* memory) {
            work(worker, i % tasks, memory + i / tasks * s.of_head, i / tasks);
        });
    }
};

template <typename Work>
void for_all_rounds(const Call& c, const Sizes& s, Work work) {
#pragma omp parallel num_threads(c.threads)
    for (int64_t first = 0; first < s.groups; first += s.units)
        work(Round{c, s, first, std::min(s.units, s.groups - first)});
}

Sizes forward_sizes(const Call& c) { return Sizes(c, 1, false); }
Sizes backward_sizes(const Call& c) { return Sizes(c, c.num_factors > 1 ? 3 : 2, true); }

}  // namespace

int64_t mhla_call_size() { return sizeof(Call); }

int64_t mhla_forward_scratch(const Call* call) { return forward_sizes(*call).scratch(*call); }
int64_t mhla_backward_scratch(const Call* call) { return backward_sizes(*call).scratch(*call); }

void mhla_forward(const Call* call) {
    const Call& c = *call;
    const Sizes s = forward_sizes(c);
    const int64_t slab_row = s.slab * s.summary, panels = round_up(slab_row, panel) / panel;
    for_all_rounds(c, s, [&](const Round& round) {
        round.all(s.slabs, [&](const Worker& worker, int64_t i, float* summaries) {
            float* slab = summaries + i * slab_row;
            for (int64_t j = 0; j < s.slab; ++j) worker.summarise(i * s.slab + j, slab + j * s.summary);
            for (int64_t head = 0; head < s.group; ++head, slab += s.of_head) worker.mix_behind(0, slab, slab);
        });
        if (c.num_factors == 1) {
            round.all_heads(panels, [&](const Worker& worker, int64_t i, float* summaries, int64_t) {
                const int64_t begin = i * panel, end = std::min(begin + panel, slab_row);
                worker.mix(worker.factor(0), s.slabs, summaries, summaries, slab_row, begin, end);
            });
            round.all(c.blocks, [&](const Worker& worker, int64_t block, float* summaries) {
                worker.read_out(block, summaries + block * s.summary);
            });
            return;
        }
        // By columns, the blocks that differ in the first axis only: they are read out while they are in the cache.
        round.all(s.slab, [&](const Worker& worker, int64_t i, float* summaries) {
            const int64_t begin = i * s.summary, end = begin + s.summary;
            for (float *of = summaries, *last = summaries + s.memory; of < last; of += s.of_head)
                worker.mix(worker.factor(0), s.slabs, of, of, slab_row, begin, end);
            for (int64_t j = i; j < c.blocks; j += s.slab) worker.read_out(j, summaries + j * s.summary);
        });
    });
}

// Of the forward pass only the denominators are there; the summaries are made anew. A unit's memory has two parts, each
// with all summaries of all its heads, and for separable mixing a third:
//
//   summaries              as they are made from keys and values
//   summaries + to_grads   mixed; then the gradients of the mixed ones; then, axis by axis, those of the summaries
//   summaries + to_given   what an axis of the mixing was given, that is the summaries mixed along the axes behind it,
//                          made again for each axis; for full mixing that is the first part
void mhla_backward(const Call* call) {
    const Call& c = *call;
    const Sizes s = backward_sizes(c);
    const int64_t slab_row = s.slab * s.summary, of_all = s.group * s.of_head;
    const int64_t panels = round_up(slab_row, panel) / panel, strips = round_up(slab_row, strip) / strip;
    const int64_t to_grads = of_all, to_given = c.num_factors > 1 ? 2 * of_all : 0;
    for_all_rounds(c, s, [&](const Round& round) {
        round.all(s.slabs, [&](const Worker& worker, int64_t i, float* summaries) {
            float* slab = summaries + i * slab_row;
            for (int64_t j = 0; j < s.slab; ++j) worker.summarise(i * s.slab + j, slab + j * s.summary);
            for (int64_t head = 0; head < s.group; ++head, slab += s.of_head)
                worker.mix_behind(0, slab, slab + to_given);
        });
        round.all_heads(panels, [&](const Worker& worker, int64_t i, float* summaries, int64_t) {
            const int64_t begin = i * panel, end = std::min(begin + panel, slab_row);
            worker.mix(worker.factor(0), s.slabs, summaries + to_given, summaries + to_grads, slab_row, begin, end);
        });
        round.all_heads(c.blocks, [&](const Worker& worker, int64_t block, float* summaries, int64_t head) {
            worker.read_back(block, head, summaries + to_grads + block * s.summary);
        });
        round.all_heads(strips, [&](const Worker& worker, int64_t i, float* summaries, int64_t) {
            const int64_t begin = i * strip, end = std::min(begin + strip, slab_row);
            float* made = summaries + to_grads;
            worker.factor_gradient(0, made, summaries + to_given, slab_row, begin, end);
            worker.mix(worker.transposed_factor(0), s.slabs, made, made, slab_row, begin, end);
        });
        round.all(s.slabs, [&](const Worker& worker, int64_t i, float* summaries) {
            float* slab = summaries + i * slab_row;
            for (int64_t head = 0; head < s.group; ++head) {
                float* of = slab + head * s.of_head;
                worker.unmix_behind(0, of, of + to_given, of + to_grads);
            }
            for (int64_t j = 0; j < s.slab; ++j) worker.summarise_back(i * s.slab + j, slab + to_grads + j * s.summary);
        });
    });
}
