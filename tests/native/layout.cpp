// Prints the layout of the structures that Python shares, one line for each field.
#include <cstddef>
#include <cstdio>

#include "planner.hpp"

#define FIELD(TYPE, NAME) std::printf(#TYPE " " #NAME " %zu %zu\n", offsetof(ucudnn::TYPE, NAME), sizeof ucudnn::TYPE::NAME)
#define SIZE(TYPE) std::printf(#TYPE " - 0 %zu\n", sizeof(ucudnn::TYPE))

int main() {
  SIZE(Question);
  FIELD(Question, operation); FIELD(Question, deterministic); FIELD(Question, dims); FIELD(Question, x_type);
  FIELD(Question, w_type); FIELD(Question, y_type); FIELD(Question, w_format); FIELD(Question, x_size);
  FIELD(Question, x_stride); FIELD(Question, w_size); FIELD(Question, y_size); FIELD(Question, y_stride);
  FIELD(Question, padding); FIELD(Question, stride); FIELD(Question, dilation); FIELD(Question, mode);
  FIELD(Question, compute_type); FIELD(Question, math_type); FIELD(Question, groups); FIELD(Question, unused);
  SIZE(Step);
  FIELD(Step, kind); FIELD(Step, algorithm); FIELD(Step, accumulates); FIELD(Step, unused); FIELD(Step, start);
  FIELD(Step, x_offset); FIELD(Step, y_offset); FIELD(Step, workspace_bytes); FIELD(Step, plan);
  FIELD(Step, x_descriptor); FIELD(Step, w_descriptor); FIELD(Step, convolution); FIELD(Step, y_descriptor);
  FIELD(Step, name);
  SIZE(Request);
  FIELD(Request, question); FIELD(Request, handle); FIELD(Request, cudnn); FIELD(Request, device);
  FIELD(Request, alignment); FIELD(Request, alpha); FIELD(Request, beta); FIELD(Request, start);
  FIELD(Request, failed); FIELD(Request, most_bytes);
  SIZE(Answer);
  FIELD(Answer, count); FIELD(Answer, divided); FIELD(Answer, steps); FIELD(Answer, token);
  FIELD(Answer, generation); FIELD(Answer, workspace_bytes); FIELD(Answer, offset_bytes);
  FIELD(Answer, arena_bytes); FIELD(Answer, calls); FIELD(Answer, text);
  SIZE(Callbacks);
  FIELD(Callbacks, ask); FIELD(Callbacks, plan); FIELD(Callbacks, forget); FIELD(Callbacks, report); FIELD(Callbacks, cudnn);
  FIELD(Callbacks, device); FIELD(Callbacks, version);
  std::printf("version - %d 0\n", ucudnn::kVersion);
}
