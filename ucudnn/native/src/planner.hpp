// The Python side, embedded in the process: decides, and prepares what a handle executes.
#ifndef UCUDNN_PLANNER_HPP_
#define UCUDNN_PLANNER_HPP_

#include <cstdint>
#include <string>

#include "question.hpp"

namespace ucudnn {

// These are read and written by Python (ucudnn/native/bridge.py): the order of their fields is a contract, and so is
// what they mean. Whoever changes it counts up, for a program may have been linked before the package was upgraded.
constexpr std::int32_t kVersion = 1;

enum StepKind : std::int32_t { kGraph = 0, kLegacy = 1 };

// One call of cuDNN, prepared: a part of a convolution.
struct Step {
  std::int32_t kind;
  std::int32_t algorithm;    // legacy: its number
  std::int32_t accumulates;  // adds to what earlier steps wrote, so that beta is 1
  std::int32_t unused;
  std::int64_t start;                                             // first sample
  std::uint64_t x_offset, y_offset;                               // bytes
  std::uint64_t workspace_bytes;                                  // legacy: what the algorithm is given
  void* plan;                                                     // graph: its execution plan
  void *x_descriptor, *w_descriptor, *convolution, *y_descriptor; // legacy
  const char* name;                                               // of the algorithm; lives as long as the plan
};

struct Request {
  const Question* question;
  std::uint64_t handle;  // its number
  void* cudnn;           // cudnnHandle_t
  std::int32_t device;
  std::int32_t alignment;     // bytes that the addresses of all tensors are multiples of
  double alpha, beta;
  std::int64_t start;         // samples before this one are computed already
  const char* failed;         // an algorithm that cuDNN did not run, or null
  std::uint64_t most_bytes;   // of workspace: memory has no room for more
};

struct Answer {
  std::int32_t count;         // of steps
  std::int32_t divided;       // whether the workspace is a segment of the arena (WD)
  const Step* steps;
  std::uint64_t token;        // what keeps the steps alive
  std::uint64_t generation;   // decisions of another generation are out of date
  std::uint64_t workspace_bytes;
  std::uint64_t offset_bytes;  // of the segment
  std::uint64_t arena_bytes;   // of all segments; 0 under WR
  const char* text;            // what was decided, or why nothing was; lives until the next answer for the handle
};

// Filled in by Python. Each of these takes Python's lock by itself, and returns 0 where it succeeded.
struct Callbacks {
  std::int32_t (*ask)(std::uint64_t handle, std::int32_t device, const Question*, std::int64_t limit, Answer*);
  std::int32_t (*plan)(const Request*, Answer*);
  // token 0: all that is kept for the handle; handle 0: whatever threads do in the background ends
  void (*forget)(std::uint64_t handle, std::uint64_t token);
  const char* cudnn;    // told to Python: file of the cuDNN that this process uses
  std::int32_t device;  // likewise: the current GPU
  std::int32_t version;
};

// The planner of this process; null where there is none, which was said on stderr. The first call starts Python.
const Callbacks* planner();

// Have Python's threads end their work when the process exits: what they call is gone soon after that begins.
void rest_at_exit();

// One line on stderr.
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));

// The line that says why plain cuDNN computes something; the same reason is given once.
void say_plain(const std::string& reason);

// Whether UCUDNN_VERBOSE asks for a line about each decision.
bool verbose();

}  // namespace ucudnn
#endif
