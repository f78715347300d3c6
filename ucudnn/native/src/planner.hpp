// The planner: Python, embedded in this process, which decides and prepares what a handle executes.
#ifndef UCUDNN_PLANNER_HPP_
#define UCUDNN_PLANNER_HPP_

#include <cstdint>
#include <string>

#include "question.hpp"

namespace ucudnn {

// Python reads and writes these structures (ucudnn/native/bridge.py). A change of their fields, or of a meaning, needs
// a new version, because a program may have been linked before the package was upgraded.
constexpr std::int32_t kVersion = 2;

enum StepKind : std::int32_t { kGraph = 0, kLegacy = 1 };

// One prepared call of cuDNN, which computes a part of a convolution.
struct Step {
  std::int32_t kind;
  std::int32_t algorithm;    // legacy: number of the algorithm
  std::int32_t accumulates;  // adds to the output of earlier steps, so that beta is 1
  std::int32_t unused;
  std::int64_t start;                                             // first sample
  std::uint64_t x_offset, y_offset;                               // in bytes
  std::uint64_t workspace_bytes;                                  // legacy: workspace of the algorithm
  void* plan;                                                     // graph: the execution plan
  void *x_descriptor, *w_descriptor, *convolution, *y_descriptor; // legacy
  const char* name;                                               // name of the algorithm; lives as long as the plan
};

struct Request {
  const Question* question;
  std::uint64_t handle;  // number of the handle
  void* cudnn;           // cudnnHandle_t
  std::int32_t device;
  std::int32_t alignment;     // alignment in bytes that the addresses of all tensors share
  double alpha, beta;
  std::int64_t start;         // samples before this one are computed already
  const char* failed;         // an algorithm that cuDNN failed to run, or null
  std::uint64_t most_bytes;   // the most workspace that fits into memory
};

struct Answer {
  std::int32_t count;         // number of steps
  std::int32_t divided;       // whether the workspace is a segment of the arena (WD)
  const Step* steps;
  std::uint64_t token;        // names the objects that keep the steps alive
  std::uint64_t generation;   // plans of another generation are out of date
  std::uint64_t workspace_bytes;
  std::uint64_t offset_bytes;  // offset of the segment
  std::uint64_t arena_bytes;   // size of the arena; 0 under WR
  std::uint64_t* calls;        // counts the kernel's calls; lives as long as the plan
  const char* text;            // the decision, or the reason why there is none; lives until the handle's next answer
};

// Written by Python. Each function takes Python's lock itself, and returns 0 if it succeeded.
struct Callbacks {
  std::int32_t (*ask)(std::uint64_t handle, std::int32_t device, const Question*, std::int64_t limit, Answer*);
  std::int32_t (*plan)(const Request*, Answer*);
  // token 0 forgets everything of the handle; handle 0 ends the work of background threads, and writes the report
  void (*forget)(std::uint64_t handle, std::uint64_t token);
  std::int32_t (*report)(const char* path);
  const char* cudnn;    // given to Python: file of the cuDNN that this process uses
  std::int32_t device;  // given to Python: the current GPU
  std::int32_t version;
};

// The planner of this process; null if there is none, with the reason on stderr. The first call starts Python.
const Callbacks* planner();

// Let Python's threads end their work when the process exits, because the libraries that they use are unloaded then.
void stop_at_exit();

// Write one line to stderr.
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Write one line to stderr, unless it was written before.
void say_once(const std::string& text);

// Write why plain cuDNN computes a convolution; each reason is written once.
void say_plain(const std::string& reason);

// Whether UCUDNN_VERBOSE requests a line for each decision.
bool verbose();

}  // namespace ucudnn
#endif
