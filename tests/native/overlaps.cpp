// Reads pairs of tensors, and prints whether they share a byte. A tensor is its number of dimensions, its first byte,
// its sizes and its strides in bytes.
#include <cstdio>
#include <iostream>

#include "overlap.hpp"

int main() {
  for (;;) {
    ucudnn::Extent tensors[2];
    long long begin[2];
    for (int i = 0; i < 2; ++i) {
      int dims = 0;
      if (!(std::cin >> dims >> begin[i])) return 0;
      long long size[5], step[5];
      for (int d = 0; d < dims; ++d) std::cin >> size[d];
      for (int d = 0; d < dims; ++d) std::cin >> step[d];
      tensors[i].run = 1;
      for (int d = dims; d-- > 0;) tensors[i].repeat(size[d], step[d]);  // the longest stride is first
    }
    std::printf("%d\n", ucudnn::share_bytes(tensors[0], tensors[1], begin[1] - begin[0]));
  }
}
