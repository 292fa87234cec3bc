// A CUDA runtime without a GPU, for PyTorch's own CUDA build. Device memory is the host's; a thread for each stream does
// its copies, events and waits in their order; nothing is known after a fork. Kernels cannot run: launching one fails,
// because kernels.py has PyTorch's computed elsewhere. What is not here returns 0 (see build.py).
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "streams.h"

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t TOTAL = size_t(80) << 30;     // which the host does not have: what is not touched costs nothing
constexpr size_t POISONED = size_t(64) << 20;  // at the beginning of a block

enum class Kind { unknown, device, pinned, registered };

struct Range {
  size_t size;
  Kind kind;
};

std::mutex mutex;  // of the three below; none is ever destroyed, since threads outlive main
auto& ranges = *new std::map<uintptr_t, Range>();
auto& streams = *new std::set<Stream*>();
size_t used = 0;

std::atomic<pid_t> home{0};  // the process that has met CUDA
thread_local cudaError_t last = cudaSuccess;

cudaError_t fail(cudaError_t error) {
  last = error;
  return error;
}

bool forked() {
  pid_t none = 0;
  home.compare_exchange_strong(none, getpid());
  return home != getpid();
}

#define NOT_AFTER_FORK \
  if (forked()) return fail(cudaErrorInitializationError)

Stream* null_stream() {
  static Stream* stream = new Stream(0);
  return stream;
}

Stream* of(cudaStream_t stream) {
  return uintptr_t(stream) <= 2 ? null_stream() : reinterpret_cast<Stream*>(stream);
}

std::shared_ptr<Event> of(cudaEvent_t event) {
  return *reinterpret_cast<std::shared_ptr<Event>*>(event);
}

std::set<Stream*> all_streams() {
  Stream* first = null_stream();
  Guard lock(mutex);
  std::set<Stream*> all = streams;
  all.insert(first);
  return all;
}

Kind kind_of(const void* pointer) {
  Guard lock(mutex);
  auto next = ranges.upper_bound(uintptr_t(pointer));
  if (next == ranges.begin()) return Kind::unknown;
  auto [begin, range] = *std::prev(next);
  return uintptr_t(pointer) < begin + range.size ? range.kind : Kind::unknown;
}

cudaError_t allocate(void** pointer, size_t size, Kind kind) {
  NOT_AFTER_FORK;
  size = size ? size : 512;
  Guard lock(mutex);
  bool on_device = kind == Kind::device;
  if (on_device && used + size > TOTAL) return fail(cudaErrorMemoryAllocation);
  if (posix_memalign(pointer, on_device ? 512 : 4096, size)) return fail(cudaErrorMemoryAllocation);
  if (on_device) {
    memset(*pointer, 0xA5, std::min(size, POISONED));  // nobody may rely on zeros
    used += size;
  }
  ranges[uintptr_t(*pointer)] = {size, kind};
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  Guard lock(mutex);
  auto found = ranges.find(uintptr_t(pointer));
  if (found == ranges.end()) return fail(cudaErrorInvalidValue);
  if (found->second.kind == Kind::device) used -= found->second.size;
  ranges.erase(found);
  free(pointer);
  return cudaSuccess;
}

cudaError_t no_kernels() {
  fprintf(stderr, "tests/fake_cuda: a CUDA kernel was launched, and none can run here (see kernels.py)\n");
  return fail(cudaErrorNoKernelImageForDevice);
}

template <typename T, typename U>
cudaError_t answer(T* found, U value) {
  *found = value;
  return cudaSuccess;
}

int context_state(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = home == getpid();
  return 0;
}

int context_current(void** context) {
  *context = &home;
  return 0;
}

int nothing() { return 0; }

}  // namespace

// --- the device ---

API cudaError_t cudaGetDeviceCount(int* count) {
  NOT_AFTER_FORK;
  return answer(count, 1);
}

API cudaError_t cudaGetDevice(int* device) {
  NOT_AFTER_FORK;
  return answer(device, 0);
}

API cudaError_t cudaSetDevice(int device) {
  NOT_AFTER_FORK;
  return device ? fail(cudaErrorInvalidDevice) : cudaSuccess;
}

API cudaError_t cudaDriverGetVersion(int* version) { return answer(version, CUDART_VERSION); }

API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

API cudaError_t cudaGetLastError() { return std::exchange(last, cudaSuccess); }

API const char* cudaGetErrorName(cudaError_t) { return "an error of tests/fake_cuda"; }

API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInitializationError: return "initialization error";
    case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device";
    default: return "an error of tests/fake_cuda";
  }
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  if (device) return fail(cudaErrorInvalidDevice);
  *found = {};
  strcpy(found->name, "NVIDIA Fake 80GB");
  for (int n = 0; n < 16; n++) found->uuid.bytes[n] = char(n + 1);
  found->totalGlobalMem = TOTAL;
  found->major = 9;
  found->multiProcessorCount = 132;
  found->warpSize = 32;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsPerMultiProcessor = 2048;
  found->unifiedAddressing = found->hostRegisterSupported = found->streamPrioritiesSupported = 1;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  bool major = attribute == cudaDevAttrComputeCapabilityMajor, minor = attribute == cudaDevAttrComputeCapabilityMinor;
  *value = major ? 9 : minor ? 0 : 1;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  return answer(greatest, -5);
}

API cudaError_t cudaDeviceSynchronize() {
  NOT_AFTER_FORK;
  for (Stream* stream : all_streams()) stream->synchronize();
  return cudaSuccess;
}

// --- memory ---

API cudaError_t cudaMalloc(void** pointer, size_t size) { return allocate(pointer, size, Kind::device); }

API cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  cudaDeviceSynchronize();
  return release(pointer);
}

API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Guard lock(mutex);
  *total = TOTAL;
  *free = TOTAL - used;
  return cudaSuccess;
}

API cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) { return allocate(pointer, size, Kind::pinned); }

API cudaError_t cudaFreeHost(void* pointer) { return release(pointer); }

API cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  NOT_AFTER_FORK;
  uintptr_t begin = uintptr_t(pointer);
  if (begin % 4096 || !size) return fail(cudaErrorInvalidValue);
  Guard lock(mutex);
  for (auto [at, range] : ranges)
    if (begin < at + range.size && at < begin + size) return fail(cudaErrorHostMemoryAlreadyRegistered);
  ranges[begin] = {size, Kind::registered};
  return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void* pointer) {
  Guard lock(mutex);
  auto found = ranges.find(uintptr_t(pointer));
  if (found == ranges.end() || found->second.kind != Kind::registered) return fail(cudaErrorHostMemoryNotRegistered);
  ranges.erase(found);
  return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
  Kind kind = kind_of(pointer);
  bool known = kind != Kind::unknown, on_device = kind == Kind::device;
  *found = {};
  found->type = on_device ? cudaMemoryTypeDevice : known ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  found->device = known ? 0 : -2;
  found->devicePointer = known ? const_cast<void*>(pointer) : nullptr;
  found->hostPointer = on_device ? nullptr : const_cast<void*>(pointer);
  return cudaSuccess;
}

// Returns at once only between pinned and device memory, as the real one.
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  NOT_AFTER_FORK;
  of(stream)->put([=] { memmove(to, from, size); });
  if (kind_of(to) == Kind::unknown || kind_of(from) == Kind::unknown) of(stream)->synchronize();
  return cudaSuccess;
}

API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  cudaError_t error = cudaMemcpyAsync(to, from, size, kind, nullptr);
  null_stream()->synchronize();
  return error;
}

API cudaError_t cudaMemsetAsync(void* pointer, int value, size_t size, cudaStream_t stream) {
  NOT_AFTER_FORK;
  of(stream)->put([=] { memset(pointer, value, size); });
  return cudaSuccess;
}

// --- streams and events ---

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  NOT_AFTER_FORK;
  auto* made = new Stream(priority);
  Guard lock(mutex);
  streams.insert(made);
  *stream = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}

API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) { return answer(priority, of(stream)->priority); }

API cudaError_t cudaStreamQuery(cudaStream_t stream) { return of(stream)->idle() ? cudaSuccess : cudaErrorNotReady; }

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  of(stream)->synchronize();
  return cudaSuccess;
}

// What is captured is done at once, and not again.
API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  of(stream)->capturing = true;
  return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  of(stream)->capturing = false;
  return answer(graph, reinterpret_cast<cudaGraph_t>(&home));
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return answer(status, of(stream)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone);
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  if (id) *id = 1;
  return cudaStreamIsCapturing(stream, status);
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) { return answer(count, 1); }

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  NOT_AFTER_FORK;
  *event = reinterpret_cast<cudaEvent_t>(new std::shared_ptr<Event>(new Event()));
  return cudaSuccess;
}

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<std::shared_ptr<Event>*>(event);
  return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned) {
  auto event = of(handle);
  of(stream)->put([event, record = event->record()] { event->pass(record); });
  return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

API cudaError_t cudaEventQuery(cudaEvent_t event) { return of(event)->passed() ? cudaSuccess : cudaErrorNotReady; }

API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  auto event = of(handle);
  while (!event->passed()) event->wait(event->last_record());
  return cudaSuccess;
}

API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  auto begin = of(from), end = of(to);
  if (cudaEventQuery(from) || cudaEventQuery(to)) return cudaErrorNotReady;
  *ms = std::chrono::duration<float, std::milli>(end->at - begin->at).count();
  return cudaSuccess;
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned) {
  auto event = of(handle);
  of(stream)->put([event, record = event->last_record()] { event->wait(record); });
  return cudaSuccess;
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  of(stream)->put([=] { function(data); });
  return cudaSuccess;
}

// --- what needs a GPU ---

API cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return no_kernels(); }

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) { return no_kernels(); }

API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return no_kernels(); }

API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return fail(cudaErrorNotSupported); }

API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  bool state = !strcmp(name, "cuDevicePrimaryCtxGetState"), current = !strcmp(name, "cuCtxGetCurrent");
  *function = state ? (void*)context_state : current ? (void*)context_current : (void*)nothing;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// --- beyond CUDA: for Python and driver.cpp ---

API void fake_cuda_sleep(cudaStream_t stream, long us) {
  of(stream)->put([us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); });
}

// The one kernel of tests/gate.py.
API void fake_cuda_wait(cudaStream_t stream, volatile int* open) {
  of(stream)->put([open] {
    while (!*open) std::this_thread::yield();
  });
}

// Freed when every stream has come by, as a pool does it.
API void fake_cuda_release(void* pointer) {
  std::shared_ptr<void> once(pointer, release);
  for (Stream* stream : all_streams()) stream->put([once] {});
}

API size_t fake_cuda_used() { return used; }

API int fake_cuda_has_context() { return home == getpid(); }
