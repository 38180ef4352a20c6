//! The test device, a GPU or the emulator, and comparison of operator calls with the f64 reference.
//!
//! The driver is `MOH_CUDA_DRIVER`; otherwise the system's, if it has a GPU; otherwise the emulator, which
//! `ci/cuda-emulator.sh` builds. Without any, tests print SKIPPED. With `MOH_REQUIRE_CUDA=1` a GPU is required:
//! SKIPPED and the emulator are failures.

use crate::memory::{Memory, bytes, bytes_mut};
use cudarc::driver::result::{self, stream::StreamKind};
use cudarc::driver::{DriverError, sys};
use moh_conformance::{Buffer, Call};
use moh_cuda::driver::{Checked, DRIVER_VARIABLE};
use moh_cuda::stream::{CAPABILITY_VARIABLE, Properties, SHARED_VARIABLE};
use moh_cuda::{Arena, DeviceTensor, Driver, RawPtr, RawStream, Stream, Workspace};
use moh_operators::{Attributes, DType, Error, Tensor, tolerance};
use std::cell::{Cell, OnceCell};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Workspace size, sufficient for all tested calls. Calls on the emulator have fewer tokens.
const WORKSPACE: usize = 320 << 20;
const EMULATED_WORKSPACE: usize = 4 << 20;

/// Numbers of multiprocessors of a small and of a large GPU. Heights of tiles, parts of keys and schedules depend on
/// them.
const MULTIPROCESSORS: [u32; 2] = [4, 132];
/// Selects the GPU that the emulator stands for: see `kernels/emulator/driver.cpp`.
const EMULATED_CAPABILITY_VARIABLE: &str = "MOH_EMULATOR_CAPABILITY";

/// A device with its own context.
pub(crate) struct Device {
    pub(crate) driver: Driver,
    context: sys::CUcontext,
    /// Whether kernels run on the emulator; tests then use smaller calls.
    pub(crate) emulated: bool,
}

// SAFETY: the driver's objects can be used on any thread.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// The test device; `None` if there is none, for which the reason is printed once.
    pub(crate) fn get() -> Option<&'static Device> {
        static DEVICE: OnceLock<Option<Device>> = OnceLock::new();
        DEVICE.get_or_init(|| Device::open().map_err(|reason| skip(&reason)).ok()).as_ref()
    }

    fn open() -> Result<Device, String> {
        let named = std::env::var_os(DRIVER_VARIABLE).is_some_and(|path| !path.is_empty());
        let usable = |driver: Driver| result::init().about("cuInit").map(|()| driver);
        let driver = match Driver::get().and_then(usable) {
            Ok(driver) => driver,
            Err(error) if named || required() => return Err(error.to_string()),
            Err(_) => Driver::at(&emulator()?).and_then(usable).map_err(|error| error.to_string())?,
        };
        let opened = || {
            let device = result::device::get(0)?;
            let name = result::device::get_name(device)?;
            // SAFETY: the device exists, and the context belongs to it.
            let context = unsafe { result::primary_ctx::retain(device) }?;
            Ok((name, context))
        };
        let (name, context) = opened().map_err(|error: DriverError| error.to_string())?;
        let emulated = name.starts_with("SIMT emulator");
        if emulated && required() {
            return Err("the driver is the emulator".to_owned());
        }
        Ok(Device { driver, context, emulated })
    }

    /// Makes the context current to this thread permanently.
    fn enter(&self) {
        enter(self.context).about("cuCtxPushCurrent").unwrap_or_else(|error| panic!("{error}"));
    }

    /// This thread's stream, which like onnxruntime's does not wait for the default stream. Everything that a test
    /// does must therefore be on this stream. Makes its context current to this thread permanently.
    fn raw_stream(&self) -> RawStream {
        thread_local!(static STREAM: OnceCell<RawStream> = const { OnceCell::new() });
        self.enter();
        let create = || result::stream::create(StreamKind::NonBlocking).unwrap_or_else(|error| panic!("{error}"));
        STREAM.with(|stream| *stream.get_or_init(create))
    }

    /// This thread's stream. Makes its context current to this thread permanently.
    pub(crate) fn stream(&self) -> Stream<'_> {
        // SAFETY: the stream lives as long as the process.
        unsafe { Stream::borrow(self.driver, self.raw_stream()) }.unwrap_or_else(|error| panic!("{error}"))
    }

    /// Device memory of `bytes` bytes between guard bytes, all poisoned. It is accessed on this thread's stream.
    pub(crate) fn memory(&self, bytes: usize) -> Memory {
        let stream = self.raw_stream();
        Memory::new(bytes, !self.emulated, stream)
    }

    /// Runs an operator once. Returns the output as f64; elements that were not written are NaN.
    ///
    /// Panics if a kernel writes out of bounds.
    pub(crate) fn run(&self, call: &Call) -> Result<Vec<f64>, Error> {
        self.run_on(&self.stream(), call)
    }

    /// As [`Device::run`], with the memory of an input as the output.
    pub(crate) fn run_in_place(&self, call: &Call, input: usize) -> Result<Vec<f64>, Error> {
        let (stream, inputs) = (self.stream(), call.tensors());
        let memories = Memories { in_place: Some(input), ..self.memories(&call.attributes, &inputs)? };
        memories.launch(&call.attributes, &inputs, &stream)?;
        stream.synchronize()?;
        Ok(memories.read())
    }

    /// As [`Device::run`], without the inputs that `left_out` names by number.
    pub(crate) fn run_without(&self, call: &Call, left_out: impl Fn(usize) -> bool) -> Result<Vec<f64>, Error> {
        let mut inputs = call.tensors();
        inputs.iter_mut().enumerate().filter(|(i, _)| left_out(*i)).for_each(|(_, input)| *input = None);
        let (stream, memories) = (self.stream(), self.memories(&call.attributes, &inputs)?);
        memories.launch(&call.attributes, &inputs, &stream)?;
        stream.synchronize()?;
        Ok(memories.read())
    }

    fn run_on(&self, stream: &Stream<'_>, call: &Call) -> Result<Vec<f64>, Error> {
        let inputs = call.tensors();
        let memories = self.memories(&call.attributes, &inputs)?;
        memories.launch(&call.attributes, &inputs, stream)?;
        stream.synchronize()?;
        Ok(memories.read())
    }

    /// Runs an operator once, captures it as a CUDA graph in the same memory, and launches the graph with the inputs
    /// of `later`.
    ///
    /// Panics if anything runs during the capture.
    pub(crate) fn run_captured(&self, call: &Call, later: &Call) -> Result<Vec<f64>, Error> {
        let (stream, inputs) = (self.stream(), call.tensors());
        let memories = self.memories(&call.attributes, &inputs)?;
        memories.launch(&call.attributes, &inputs, &stream)?;
        stream.synchronize()?;
        memories.output.poison();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and used by this thread only; the memory outlives the launch.
        unsafe {
            result::stream::begin_capture(stream.raw(), mode).about("cuStreamBeginCapture")?;
            let launched = memories.launch(&call.attributes, &inputs, &stream);
            let graph = result::stream::end_capture(stream.raw()).about("cuStreamEndCapture");
            launched?;
            let graph = graph?;
            assert!(memories.read().iter().all(|x| x.is_nan()), "a kernel ran during the capture");
            memories.write(&later.tensors());
            let mut executable = std::ptr::null_mut();
            sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0).about("cuGraphInstantiate")?;
            sys::cuGraphLaunch(executable, stream.raw()).about("cuGraphLaunch")?;
        }
        stream.synchronize()?;
        Ok(memories.read())
    }

    /// Allocates device memory for a call and copies its inputs.
    fn memories(&self, attributes: &Attributes, inputs: &[Option<Tensor<'_>>]) -> Result<Memories, Error> {
        let described: Vec<_> =
            inputs.iter().map(|input| input.map(|input| (input.shape, input.data.dtype()))).collect();
        let (dtype, shape) = attributes.operator().validate(attributes, &described)?;
        let dtype = attributes.operator().output_dtype(dtype);
        let len: usize = shape.iter().product();
        let memories = Memories {
            inputs: inputs.iter().map(|input| input.map(|input| self.memory(bytes(input.data).len()))).collect(),
            output: self.memory(len * if dtype == DType::F32 { 4 } else { 2 }),
            workspace: self.memory(if self.emulated { EMULATED_WORKSPACE } else { WORKSPACE }),
            in_place: None,
            dtype,
            shape,
        };
        memories.write(inputs);
        Ok(memories)
    }

    /// Runs an operator as on a small and as on a large GPU. Panics if results differ from the f64 reference by more
    /// than the kernels' tolerance. `exact` selects the elements that must be equal to the reference.
    ///
    /// One of the two, in turn, runs twice, on the emulator in every fourth call; both results must be the same.
    pub(crate) fn check(&self, call: &Call, exact: impl Fn(usize) -> bool) {
        thread_local!(static CALLS: Cell<usize> = const { Cell::new(0) });
        let number = CALLS.replace(CALLS.get() + 1);
        let run = |multiprocessors: u32| {
            println!("{multiprocessors} multiprocessors");
            let stream = self.stream();
            let properties = Properties { multiprocessors, ..stream.properties() };
            self.run_on(&stream.with_properties(properties), call).unwrap_or_else(|error| panic!("{error}"))
        };
        let expected = call.expected();
        let [first, second] = [number, number + 1].map(|i| MULTIPROCESSORS[i % 2]);
        let found = run(first);
        compare(call.output_dtype(), &found, &expected, &exact);
        if !self.emulated || (number / 2).is_multiple_of(4) {
            let again = run(first);
            let other = found.iter().zip(&again).position(|(a, b)| a.to_bits() != b.to_bits());
            assert_eq!(other, None, "the same call gave another result at this element");
        }
        compare(call.output_dtype(), &run(second), &expected, exact);
    }
}

/// Makes a context current to this thread permanently.
fn enter(context: sys::CUcontext) -> Result<(), DriverError> {
    // SAFETY: the context lives as long as the process.
    unsafe { sys::cuCtxPushCurrent_v2(context) }.result()
}

/// Runs `test` on the test device, if there is one.
pub(crate) fn on_device(test: impl Fn(&Device)) {
    if let Some(device) = Device::get() {
        test(device);
    }
}

/// A GPU without kernels for Hopper: compute capability, and bytes of shared memory per block.
pub(crate) struct OtherGpu(&'static str, &'static str);

/// A GPU that is too old.
pub(crate) const T4: OtherGpu = OtherGpu("75", "65536");
/// A data-centre GPU.
pub(crate) const A100: OtherGpu = OtherGpu("80", "166912");
/// A consumer's GPU, with the least shared memory of those that are supported; later ones (8.9, 12.0) have no more.
pub(crate) const RTX_30: OtherGpu = OtherGpu("86", "101376");

/// A GPU after Hopper, without kernels of its own: those before Hopper, with Hopper's shared memory.
pub(crate) const B200: OtherGpu = OtherGpu("100", "232448");

/// Reruns the tests whose names contain one of `tests` in a process that uses the kernels for another GPU. The
/// emulator becomes this GPU; a real one is limited to what that has.
pub(crate) fn rerun_on_other_gpu(gpu: &OtherGpu, tests: &[&str]) {
    let Some(device) = Device::get() else { return };
    let set = |variable| std::env::var_os(variable).is_some();
    if set(CAPABILITY_VARIABLE) || set(EMULATED_CAPABILITY_VARIABLE) {
        return;
    }
    let OtherGpu(capability, shared_bytes) = gpu;
    let limits = match device.emulated {
        true => vec![(EMULATED_CAPABILITY_VARIABLE, capability)],
        false => vec![(CAPABILITY_VARIABLE, capability), (SHARED_VARIABLE, shared_bytes)],
    };
    let limits: Vec<(&str, &OsStr)> = limits.into_iter().map(|(name, value)| (name, OsStr::new(*value))).collect();
    rerun_with(&limits, tests);
}

/// Reruns the tests whose names contain one of `tests` in a process with these variables.
pub(crate) fn rerun_with(variables: &[(&str, &OsStr)], tests: &[&str]) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args(tests).envs(variables.iter().copied()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{variables:?}: {said}{errors}");
    for test in tests {
        assert!(said.contains(&format!("test {test}")), "no test is named {test}: {said}");
    }
}

/// A call's inputs, output and workspace.
struct Memories {
    inputs: Vec<Option<Memory>>,
    output: Memory,
    workspace: Memory,
    /// The input whose memory is the output's.
    in_place: Option<usize>,
    dtype: DType,
    shape: Vec<usize>,
}

impl Memories {
    fn output(&self) -> &Memory {
        self.in_place.and_then(|input| self.inputs[input].as_ref()).unwrap_or(&self.output)
    }

    fn write(&self, inputs: &[Option<Tensor<'_>>]) {
        for (memory, input) in self.inputs.iter().zip(inputs) {
            if let (Some(memory), Some(input)) = (memory, input) {
                memory.write(bytes(input.data));
            }
        }
    }

    /// Launches the operator on the stream. Of `inputs`, only shapes and types are used.
    fn launch(&self, attributes: &Attributes, inputs: &[Option<Tensor<'_>>], stream: &Stream<'_>) -> Result<(), Error> {
        let tensors: Vec<Option<DeviceTensor<'_>>> = inputs
            .iter()
            .zip(&self.inputs)
            .map(|(input, memory)| {
                let (input, memory) = (input.as_ref()?, memory.as_ref()?);
                Some(DeviceTensor { shape: input.shape, dtype: input.data.dtype(), ptr: memory.ptr() })
            })
            .collect();
        let output = DeviceTensor { shape: &self.shape, dtype: self.dtype, ptr: self.output().ptr() };
        // SAFETY: the device memory has these sizes and lives until the caller has synchronised the stream.
        unsafe {
            let arena = Arena::new(self.workspace.ptr(), self.workspace.bytes());
            moh_cuda::run(attributes, &tensors, output, stream, &Once(arena, Cell::new(false)))
        }
    }

    /// Reads the output. Panics if the guard bytes of any memory were written to.
    fn read(&self) -> Vec<f64> {
        for memory in self.inputs.iter().flatten().chain([&self.output, &self.workspace]) {
            memory.check_frame();
        }
        let len = self.shape.iter().product();
        let mut buffer = Buffer::new(self.dtype, &vec![0.0; len]);
        self.output().read(bytes_mut(buffer.data_mut()));
        (0..len).map(|i| buffer.data().at(i)).collect()
    }
}

/// A workspace of which a call may allocate one block.
struct Once(Arena, Cell<bool>);

// SAFETY: as the arena.
unsafe impl Workspace for Once {
    fn allocate(&self, bytes: usize) -> Result<RawPtr, Error> {
        assert!(!self.1.replace(true) && bytes > 0, "more than one block of workspace, or an empty one");
        self.0.allocate(bytes)
    }
}

/// Panics if results differ from the reference by more than the tolerance of CUDA kernels.
pub(crate) fn compare(dtype: DType, found: &[f64], expected: &[f64], exact: impl Fn(usize) -> bool) {
    assert_eq!(found.len(), expected.len());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let size = norm(&mut expected.iter().copied());
    // A single element's error may exceed the relative error of the whole output; the bound scales with the outputs'
    // size.
    let scale = expected.iter().fold(1.0f64, |max, x| max.max(x.abs()));
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let allowed = if exact(i) { 0.0 } else { tolerance::operator_output(dtype) * scale };
        assert!((found - expected).abs() <= allowed, "element {i}: expected {expected}, found {found}");
    }
    let error = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    let allowed = tolerance::cuda_relative(dtype);
    assert!(error <= allowed * size, "relative error {:e}, expected at most {allowed:e}", error / size);
}

fn required() -> bool {
    std::env::var("MOH_REQUIRE_CUDA").is_ok_and(|value| value == "1")
}

fn skip(reason: &str) {
    assert!(!required(), "MOH_REQUIRE_CUDA is set: {reason}");
    println!("SKIPPED: {reason}");
}

/// Builds the emulator if a compiler is available.
pub(crate) fn emulator() -> Result<PathBuf, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let output =
        Command::new(root.join("ci/cuda-emulator.sh")).output().map_err(|e| format!("no CUDA emulator: {e}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).trim().into()),
        false if String::from_utf8_lossy(&output.stderr).contains("needs g++") => {
            Err("no g++ for the CUDA emulator".into())
        }
        false => panic!("ci/cuda-emulator.sh: {}", String::from_utf8_lossy(&output.stderr)),
    }
}

/// The seed of random inputs: `MOH_SEED`, or 1. Failure messages must contain it.
pub(crate) fn seed() -> u64 {
    std::env::var("MOH_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1)
}
