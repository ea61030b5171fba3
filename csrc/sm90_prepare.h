// The scratch of the Hopper family: its size, its layout, and the kernels that fill it.
#pragma once
#include "sm90_launch.h"

namespace mtraining::sm90 {

int64_t workspace_bytes(const AttentionParams& params, bool backward);

// Points counter, distance_bits and statistics into params.workspace.
void partition_workspace(KernelArguments& args);

void fill_distance_bits(const KernelArguments& args, cudaStream_t stream);
void fill_statistics(const KernelArguments& args, cudaStream_t stream);

}  // namespace mtraining::sm90
