// Both libraries of a driver. CUDA's begins, but finds no device (see build.py); it tells of a context as soon as the
// runtime has been used. NVML's has one device: its memory is what this process has of it, and it is always as busy.
#include <unistd.h>

#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

extern "C" size_t fake_cuda_used();
extern "C" int fake_cuda_has_context();

namespace {

constexpr unsigned long long TOTAL = 80ULL << 30;
constexpr int NOT_FOUND = 6, INSUFFICIENT_SIZE = 7;

struct Utilization {
  unsigned gpu, memory;
};

struct Memory {
  unsigned long long total, free, used;
};

struct Process {
  unsigned pid;
  unsigned long long used;
  unsigned instance, compute_instance;
};

}  // namespace

API int cuInit(unsigned) { return 0; }

API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = fake_cuda_has_context();
  return 0;
}

API int nvmlInitWithFlags(unsigned) { return 0; }

API int nvmlShutdown() { return 0; }

API const char* nvmlErrorString(int) { return "an error of tests/fake_cuda"; }

API int nvmlSystemGetDriverVersion(char* text, unsigned) {
  strcpy(text, "580.0");
  return 0;
}

API int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 1;
  return 0;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, const void** device) {
  static const int only = 0;
  *device = &only;
  return index ? NOT_FOUND : 0;
}

API int nvmlDeviceGetHandleByUUID(const char* uuid, const void** device) {
  return nvmlDeviceGetHandleByIndex_v2(strcmp(uuid, "GPU-01020304-0506-0708-090a-0b0c0d0e0f10") != 0, device);
}

API int nvmlDeviceGetUtilizationRates(const void*, Utilization* found) {
  *found = {50, 25};
  return 0;
}

API int nvmlDeviceGetJpgUtilization(const void*, unsigned* percent, unsigned* period_us) {
  *percent = 25;
  *period_us = 100000;
  return 0;
}

API int nvmlDeviceGetMemoryInfo(const void*, Memory* found) {
  unsigned long long used = fake_cuda_used();
  *found = {TOTAL, TOTAL - used, used};
  return 0;
}

API int nvmlDeviceGetComputeRunningProcesses_v3(const void*, unsigned* count, Process* found) {
  unsigned room = *count;
  *count = fake_cuda_has_context();
  if (*count > room) return INSUFFICIENT_SIZE;
  if (*count) *found = {unsigned(getpid()), fake_cuda_used(), 0, 0};
  return 0;
}
