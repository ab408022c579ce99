// CUDA devices that don't exist, for a CPU build of torch: their tensors have the CUDA dispatch key and lie in the
// host's memory. (See __init__.py for what this can show and what it can't.)
//
//   the devices      a device guard, an allocator and CUDA hooks, as torch asks for them
//   use of memory    a message that is under way forbids to read or to overwrite its tensor
//   operators        those that create, view or copy tensors have kernels here; all others run on the CPU, after a check
//                    that their tensors are on the same device
//   for Python       what cuda.py and nccl.py need

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <cstdlib>
#include <mutex>
#include <unordered_map>

namespace py = pybind11;
using at::IntArrayRef;
using at::MemoryFormat;
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

// The devices

namespace {

thread_local DeviceIndex current = 0;
DeviceIndex device_count = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  DeviceType type() const override { return static_type; }
  Device getDevice() const override { return Device(static_type, current); }
  void setDevice(Device device) const override {
    if (device.has_index()) current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { setDevice(device); }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return device_count; }
};

struct OnDevice {  // makes the device that a factory asks for the current one
  DeviceIndex before = current;
  explicit OnDevice(std::optional<Device> device) {
    if (device && device->has_index()) current = device->index();
  }
  ~OnDevice() { current = before; }
};

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    if (bytes && posix_memalign(&memory, 64, bytes)) throw std::bad_alloc();
    return {memory, memory, &std::free, Device(DeviceType::CUDA, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Allocator allocator;

}  // namespace

namespace at {
struct EmulatedHooks : CUDAHooksInterface {
  explicit EmulatedHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return device_count; }
  DeviceIndex deviceCount() const override { return device_count; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  void deviceSynchronize(DeviceIndex) const override {}
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetDefaultCPUAllocator(); }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, current); }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, EmulatedHooks)
}  // namespace at
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// Use of memory

namespace {

struct Message {
  int64_t number;
  const char* begin;
  const char* end;
  bool writes;      // the message writes its tensor: a receive, or the output of a collective
  bool waited_for;  // the program has called wait(): what follows on the stream comes after the message
};
std::mutex messages_lock;
std::unordered_map<const void*, std::vector<Message>> messages;  // by storage, one for each tensor in a message
auto& finish_message = *new std::function<void(int64_t)>;  // waits until a message has arrived; outlives Python
std::atomic<size_t> under_way{0};

std::pair<const char*, const char*> bytes_of(const Tensor& tensor) {
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {begin, tensor.numel() ? begin + (last + 1) * tensor.itemsize() : begin};
}

// Called before an operator reads or writes a tensor.
void use(const Tensor& tensor, bool write, const std::string& what) {
  if (!under_way || !tensor.defined() || !tensor.is_cuda()) return;
  std::vector<int64_t> to_finish;
  const auto [begin, end] = bytes_of(tensor);
  {
    std::lock_guard<std::mutex> guard(messages_lock);
    const auto found = messages.find(tensor.storage().unsafeGetStorageImpl());
    if (found == messages.end()) return;
    for (const Message& message : found->second) {
      if (message.end <= begin || end <= message.begin) continue;
      if (message.waited_for) {
        to_finish.push_back(message.number);
      } else {
        TORCH_CHECK(!write && !message.writes, "EMULATED GPU: ", what, write ? " writes" : " reads", " a tensor of ",
                    tensor.sizes(), " while a message that ", message.writes ? "writes" : "reads",
                    " it is under way. Call wait() on its work first.");
      }
    }
  }
  for (const int64_t number : to_finish) finish_message(number);
}

// Operators

Tensor on_cpu_without_flags(const Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU).requires_grad(false).pinned_memory(std::nullopt);
  return at::for_blob(tensor.mutable_data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .deleter([keep = tensor](void*) {})
      .options(options)
      .make_tensor();
}

// The same memory as a tensor of the CPU
Tensor on_cpu(const Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  Tensor alias = on_cpu_without_flags(tensor);
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

c10::ScalarType type_or_default(std::optional<at::ScalarType> type) {
  return type.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
}

constexpr c10::DispatchKeySet CUDA_KEY(c10::DispatchKey::CUDA);

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<MemoryFormat> format) {
  OnDevice on(device);
  return at::detail::empty_generic(size, &allocator, CUDA_KEY, type_or_default(type), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> type,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  OnDevice on(device);
  return at::detail::empty_strided_generic(size, stride, &allocator, CUDA_KEY, type_or_default(type));
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  c10::impl::ExcludeDispatchKeyGuard without_autograd(c10::autograd_dispatch_keyset);
  use(from, false, "copy_");
  use(to, true, "copy_");
  if (to.numel() || from.numel()) on_cpu(to).copy_(on_cpu(from), non_blocking);
  return to;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Tensor target = to;
  return copy_(target, from, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

void grow(c10::StorageImpl* storage, size_t bytes, Device device) {
  if (storage->nbytes() >= bytes) return;
  OnDevice on(device);
  auto memory = allocator.allocate(bytes);
  if (storage->nbytes()) std::memcpy(memory.get(), storage->data(), storage->nbytes());
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes);
}

const Tensor& resize_(const Tensor& tensor, IntArrayRef size, std::optional<MemoryFormat>) {
  const auto elements = c10::multiply_integers(size) + tensor.storage_offset();
  grow(tensor.storage().unsafeGetStorageImpl(), elements * tensor.itemsize(), tensor.device());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return tensor;
}

Tensor& set_storage(Tensor& tensor, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.size() == size.size() && stride.data()) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  impl->set_storage_offset(offset);
  return tensor;
}

Tensor& set_whole_storage(Tensor& tensor, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / tensor.itemsize());
  return set_storage(tensor, std::move(source), 0, {elements}, {});
}

Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_empty(Tensor& tensor) {
  OnDevice on(tensor.device());
  const auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                             allocator.allocate(0), &allocator, true);
  return set_storage(tensor, c10::Storage(storage), 0, {0}, {1});
}

at::Scalar read_number(const Tensor& tensor) {
  use(tensor, false, "item");
  return at::_local_scalar_dense(on_cpu(tensor));
}

Tensor as_strided(const Tensor& tensor, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

Tensor reshape_alias(const Tensor& tensor, IntArrayRef size, IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, tensor.storage_offset());
}

bool may_mix_devices(const std::string& name) {  // a tensor on a GPU may be indexed by one of the CPU
  return name.rfind("aten::index", 0) == 0 || name == "aten::_index_put_impl_" || name == "aten::is_set_to";
}

// Every operator without a kernel of its own
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.operator_name().name;
  const auto arguments = torch::jit::last(stack, schema.arguments().size());
  std::optional<Device> device;
  std::string first;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = schema.arguments()[i];
    const bool writes = argument.alias_info() && argument.alias_info()->isWrite();
    const auto look_at = [&](const Tensor& tensor) {
      const bool is_number = tensor.defined() && tensor.dim() == 0 && tensor.is_cpu();
      if (!tensor.defined() || is_number) return;
      if (!device) {
        device = tensor.device();
        first = argument.name();
      }
      TORCH_CHECK(*device == tensor.device() || may_mix_devices(name),
                  "EMULATED GPU: Expected all tensors to be on the same device, but in ", name, " ", argument.name(),
                  " is on ", tensor.device(), " and ", first, " is on ", *device);
      use(tensor, writes, name);
    };
    const auto& value = arguments[i];
    if (value.isTensor()) {
      look_at(value.toTensor());
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) look_at(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        if (tensor) look_at(*tensor);
      }
    }
  }
  at::native::cpu_fallback(op, stack, false);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_empty);
  m.impl("_local_scalar_dense", &read_number);
  m.impl("as_strided", &as_strided);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("view", &at::native::view);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("unfold", &at::native::unfold);
}

// For Python

PYBIND11_MODULE(_emulated_gpu, m) {
  c10::SetAllocator(DeviceType::CUDA, &allocator, 255);
  m.def("set_device_count", [](int count) { device_count = static_cast<DeviceIndex>(count); });
  m.def("set_device", [](int device) { current = static_cast<DeviceIndex>(device); });
  m.def("current_device", [] { return static_cast<int>(current); });
  m.def("on_cpu", &on_cpu);
  m.def("resize_storage", [](const Tensor& tensor, int64_t bytes) {
    use(tensor, true, "resize_");  // a GPU's stream frees memory only after the messages that it waits for
    auto* const storage = tensor.storage().unsafeGetStorageImpl();
    grow(storage, bytes, tensor.device());
    storage->set_nbytes(bytes);
  });
  m.def("on_finish", [](std::function<void(int64_t)> function) { finish_message = std::move(function); });
  m.def("message_starts", [](const Tensor& tensor, int64_t number, bool writes) {
    std::lock_guard<std::mutex> guard(messages_lock);
    const auto [begin, end] = bytes_of(tensor);
    messages[tensor.storage().unsafeGetStorageImpl()].push_back({number, begin, end, writes, false});
    ++under_way;
  });
  m.def("message_is_waited_for", [](const Tensor& tensor, int64_t number) {
    std::lock_guard<std::mutex> guard(messages_lock);
    for (Message& message : messages[tensor.storage().unsafeGetStorageImpl()]) {
      if (message.number == number) message.waited_for = true;
    }
  });
  m.def("message_has_arrived", [](const Tensor& tensor, int64_t number) {
    std::lock_guard<std::mutex> guard(messages_lock);
    const auto found = messages.find(tensor.storage().unsafeGetStorageImpl());
    if (found == messages.end()) return;
    under_way -= std::erase_if(found->second, [number](const Message& message) { return message.number == number; });
    if (found->second.empty()) messages.erase(found);
  });
  m.def("use", &use);
}
