// What native.py and the compiled code tell one another. The structures are those of native.py, field by field.

#pragma once

#include <cstdint>

extern "C" {

struct Tokens {
    const void* data;
    int64_t batch, token, head;  // strides in elements; the elements of a head lie side by side
    int64_t dtype;
};

struct Call {
    Tokens query, key, value;
    const uint8_t* key_mask;        // (batch, tokens) or null
    const int64_t* token_of_place;  // tokens in the order of their blocks
    const int64_t* first_place;     // of each block, and behind them the number of tokens
    const float* factors[3];        // of the mixing: one (blocks, blocks), or one per axis
    int64_t counts[3];              // rows of each factor
    int64_t num_factors;
    int64_t batch, tokens, heads, dim, width, blocks, block_size;
    int64_t feature_map, normalize;
    float eps;
    int64_t threads;
    float* scratch;  // as many floats as mhla_forward_scratch or mhla_backward_scratch says
    float* kept;     // denominators (batch, heads, blocks, block_size), or null if forward need not keep them
    void* out;       // of forward; contiguous, in the dtype of the values

    Tokens out_grad;                             // from here on for backward only
    void *query_grad, *key_grad, *value_grad;    // contiguous, in the dtype of what they belong to, or null
    float* factor_grads[3];                      // (threads, rows, rows) or null; added to
};

int64_t mhla_call_size();  // bytes of a Call

// How many floats `scratch` must have.
int64_t mhla_forward_scratch(const Call* call);
int64_t mhla_backward_scratch(const Call* call);

void mhla_forward(const Call* call);
void mhla_backward(const Call* call);

}  // extern "C"

enum DType : int64_t { float32 = 0, bfloat16 = 1 };
enum FeatureMap : int64_t { identity = 0, relu = 1, relu_eps = 2 };
