//! Tests of the library through its C interface, with the fake host of `fake.rs`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::undocumented_unsafe_blocks)]

mod in_place;
#[cfg(target_os = "linux")]
mod packing;
mod settings;

use crate::api::Api;
use crate::context::KernelContext;
use crate::failure::Failure;
use crate::fake::{self, Call, Info, Node, Options, Tensor, live, outcome};
use crate::guard::guard;
use crate::host::SessionHost;
use crate::objects::CpuMemory;
use crate::threads::SessionThreads;
use crate::{API_VERSION, RegisterCustomOps};
use half::{bf16, f16};
use moh_cpu::{Host, Precision, Scratch};
use moh_operators::{
    Attributes, DOMAIN, DType, Data, Definition, Linear, OPERATORS, Operator, RoutedProjection, TopKRouter, Value,
};
use ort_sys::*;
use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

static NEW: LazyLock<OrtApi> = LazyLock::new(fake::api);
static OTHER: LazyLock<OrtApi> = LazyLock::new(fake::api);

unsafe extern "system" fn new_host(version: u32) -> *const OrtApi {
    if version <= 31 { &raw const *NEW } else { ptr::null() }
}
unsafe extern "system" fn other_host(_: u32) -> *const OrtApi {
    &raw const *OTHER
}
unsafe extern "system" fn old_host(version: u32) -> *const OrtApi {
    if version < API_VERSION { &raw const *NEW } else { ptr::null() }
}
unsafe extern "system" fn version() -> *const c_char {
    c"1.16.3".as_ptr()
}

const HOST: OrtApiBase = OrtApiBase { GetApi: new_host, GetVersionString: version };

pub(crate) fn api() -> Api {
    unsafe { Api::new(&HOST, API_VERSION) }.unwrap()
}

fn register(base: &OrtApiBase) -> (Options, Option<(OrtErrorCode, String)>) {
    register_with(base, &[])
}

fn register_with(base: &OrtApiBase, entries: &[(&str, &str)]) -> (Options, Option<(OrtErrorCode, String)>) {
    let entries = entries.iter().map(|(key, value)| (CString::new(*key).unwrap(), CString::new(*value).unwrap()));
    let mut options = Options { entries: entries.collect(), ..Options::default() };
    let status = unsafe { RegisterCustomOps((&raw mut options).cast(), base) };
    (options, outcome(status))
}

/// The registered table of an operator on the CPU provider.
fn table(operator: &Operator, dtype: DType) -> &'static OrtCustomOp {
    table_on(None, operator, dtype).unwrap()
}

/// The registered table of an operator on a provider.
pub(crate) fn table_on(provider: Option<&CStr>, operator: &Operator, dtype: DType) -> Option<&'static OrtCustomOp> {
    let (options, status) = register(&HOST);
    assert_eq!(status, None);
    table_of(&options, provider, operator, dtype)
}

fn table_of(
    options: &Options,
    provider: Option<&CStr>,
    operator: &Operator,
    dtype: DType,
) -> Option<&'static OrtCustomOp> {
    let of = |op: &&&OrtCustomOp| unsafe {
        let name = CStr::from_ptr(op.GetName.unwrap()(**op)).to_str().unwrap();
        let on = op.GetExecutionProviderType.unwrap()(**op);
        let on = if on.is_null() { None } else { Some(CStr::from_ptr(on)) };
        on == provider && name == operator.name && op.GetInputType.unwrap()(**op, 0) == crate::element::onnx_type(dtype)
    };
    let ops: Vec<&OrtCustomOp> = unsafe { &*options.domains[0] }.ops.iter().map(|&op| unsafe { &*op }).collect();
    ops.iter().find(of).copied()
}

#[test]
fn every_operator_is_registered_for_every_type() {
    let (options, status) = register(&HOST);
    assert_eq!(status, None);
    let [domain] = options.domains[..] else { panic!("{} domains", options.domains.len()) };
    let domain = unsafe { &*domain };
    assert_eq!(domain.name.to_str().unwrap(), DOMAIN);
    let on_cuda = |operator: &Operator| table_on(Some(c"CUDAExecutionProvider"), operator, DType::F32).is_some();
    let cuda = OPERATORS.iter().filter(|operator| on_cuda(operator));
    // Some only where the processor has a matrix unit, or there are kernels for a GPU.
    let left = |operator| moh_cpu::is_left_to_body(operator, Precision::Highest, crate::pages::can_tell());
    let ours: Vec<_> = OPERATORS.iter().filter(|operator| on_cuda(operator) || !left(operator)).collect();
    assert!(OPERATORS.iter().all(|operator| operator.may_be_left || ours.contains(&operator)), "{ours:?}");
    assert_eq!(domain.ops.len(), (ours.len() + cuda.count()) * DType::ALL.len());
    for (operator, dtype) in ours.into_iter().flat_map(|operator| DType::ALL.map(|dtype| (operator, dtype))) {
        let op = table(operator, dtype);
        assert_eq!(op.version, API_VERSION);
        assert_eq!(unsafe { op.GetStartVersion.unwrap()(op) }, operator.since as i32);
        assert!(unsafe { op.GetExecutionProviderType.unwrap()(op) }.is_null());
        assert_eq!(unsafe { op.GetInputTypeCount.unwrap()(op) }, operator.inputs.len());
        assert_eq!(unsafe { op.GetOutputTypeCount.unwrap()(op) }, 1);
        for (i, input) in operator.inputs.iter().enumerate() {
            let ty = input.ty.dtype(dtype);
            assert_eq!(unsafe { op.GetInputType.unwrap()(op, i) }, crate::element::onnx_type(ty));
            let optional = OrtCustomOpInputOutputCharacteristic::INPUT_OUTPUT_OPTIONAL;
            assert_eq!(unsafe { op.GetInputCharacteristic.unwrap()(op, i) } == optional, input.optional);
        }
        // These fields are not in API 17: an older host would misinterpret them, a newer one reads them only if
        // version >= 18.
        assert!(op.GetMayInplace.is_none() && op.GetAliasMap.is_none());
    }
    assert_eq!(live(), 0);
}

#[test]
fn sessions_of_one_host_share_a_domain() {
    let other = OrtApiBase { GetApi: other_host, GetVersionString: version };
    let domains = |base| register(base).0.domains;
    let (first, second, third) = (domains(&HOST), domains(&HOST), domains(&other));
    assert_eq!(first, second);
    assert_ne!(first, third);
    for domain in [first[0], third[0]] {
        assert_eq!(unsafe { &*domain }.sessions, 1, "announced once per host");
    }
    assert_eq!(live(), 0);
}

#[test]
fn pack_weights_entry_that_is_no_switch_is_an_error() {
    let (options, status) = register_with(&HOST, &[("ai.moh.pack_weights", "often")]);
    assert!(options.domains.is_empty());
    let (code, message) = status.unwrap();
    assert_eq!(code, OrtErrorCode::ORT_INVALID_ARGUMENT);
    assert_eq!(message, "session config entry ai.moh.pack_weights: expected 0 or 1, found \"often\"");
    assert_eq!(live(), 0);
}

/// onnxruntime would refuse the second domain when it makes the session.
#[test]
fn registering_again_adds_no_second_domain() {
    let (mut options, status) = register(&HOST);
    assert_eq!(status, None);
    let mut again = || outcome(unsafe { RegisterCustomOps((&raw mut options).cast(), &HOST) });
    assert_eq!(again(), None);
    assert_eq!(options.domains.len(), 1);
    options.entries.push((c"ai.moh.pack_weights".to_owned(), c"1".to_owned()));
    let (code, message) = outcome(unsafe { RegisterCustomOps((&raw mut options).cast(), &HOST) }).unwrap();
    assert_eq!((code, options.domains.len()), (OrtErrorCode::ORT_INVALID_ARGUMENT, 1));
    assert!(
        message.contains("set ai.moh.pack_weights and ai.moh.float32_matmul_precision before libmoh_ops is registered"),
        "{message}"
    );
    assert_eq!(live(), 0);
}

/// RoutedProjection with a constant weight: 3 tokens of width 5, 2 heads of width 3.
#[test]
fn constant_weights_are_packed_on_request() {
    let attributes = vec![("num_heads", Value::Int(2)), ("weight_layout", Value::Int(0))];
    let shapes = [vec![1, 3, 5], vec![6, 5], vec![1, 3, 2]];
    let number = |i: usize, j: usize| ((i * 31 + j * 7) % 11) as f32 / 8.0 - 0.5;
    let numbers = shapes.iter().enumerate().map(|(i, s)| (0..s.iter().product()).map(|j| number(i, j)).collect());
    let numbers: Vec<Vec<f32>> = numbers.collect();
    let tensor = |i: usize| Tensor::new(&shapes[i], Data::F32(&numbers[i]), 2 * i);
    let weight = tensor(1);
    let node = Node {
        attributes: attributes.clone(),
        inputs: shapes.iter().map(|shape| Some(Info::sized(DType::F32, shape))).collect(),
        output: None,
        constants: vec![(1, &raw const weight)],
    };
    let (expected, can_pack) = {
        let get = |name| attributes.iter().find(|(n, _)| *n == name).map(|(_, value)| value.clone());
        let attributes = Attributes::read(RoutedProjection::OPERATOR, |def| get(def.name)).unwrap();
        let tensors = shapes.iter().zip(&numbers);
        let tensors: Vec<_> =
            tensors.map(|(shape, data)| Some(moh_operators::Tensor { shape, data: Data::F32(data) })).collect();
        // Not every kernel for a matrix unit packs, and none does in place of the tensor.
        let packing = moh_cpu::Packing { beside: true, ..moh_cpu::Packing::default() };
        let packs = moh_cpu::pack(&attributes, 1, tensors[1].unwrap(), packing).unwrap().is_some();
        (RoutedProjection::OPERATOR.reference(&attributes, &tensors).unwrap(), packs)
    };
    for (entry, packs) in [(None, false), (Some("0"), false), (Some("1"), true)] {
        let entries: Vec<_> = entry.map(|value| ("ai.moh.pack_weights", value)).into_iter().collect();
        let (options, status) = register_with(&HOST, &entries);
        assert_eq!(status, None);
        let table = table_of(&options, None, RoutedProjection::OPERATOR, DType::F32).unwrap();
        let packs = packs && can_pack;
        let before = live();
        drop(Made::of(table, &node).unwrap());
        assert_eq!(live(), before);
        let kernel = Made::of(table, &node).unwrap();
        // The call passes zeros as the weight: the result is right only if the packed weight is used.
        let mut call = Call::new(DType::F32, vec![Some(tensor(0)), None, Some(tensor(2))]);
        call.inputs[1] = Some(Tensor::new(&shapes[1], Data::F32(&[0.0; 30]), 0));
        let found = kernel.run(&mut call).unwrap();
        let matches = found.iter().zip(&expected).all(|(found, expected)| (found - expected).abs() < 1e-6);
        assert_eq!(matches, packs, "{entry:?}: {found:?}");
        assert!(packs || found.iter().all(|&x| x == 0.0), "{entry:?}: {found:?}");
    }
}

#[test]
fn host_older_than_1_17_is_refused() {
    let (options, status) = register(&OrtApiBase { GetApi: old_host, GetVersionString: version });
    assert!(options.domains.is_empty());
    let (_, message) = status.unwrap();
    assert!(message.contains("1.17 or newer") && message.contains("1.16.3"), "{message}");
    assert_eq!(live(), 0);
}

#[test]
fn null_arguments_are_errors() {
    assert!(outcome(unsafe { RegisterCustomOps(ptr::null_mut(), &HOST) }).is_some());
    assert!(unsafe { RegisterCustomOps(ptr::null_mut(), ptr::null()) }.0.is_null());
}

/// 2 sequences, 3 queries (or as many as stated), 5 keys, 4 query heads, 2 KV heads, head widths 6 and 3.
pub(crate) struct Example {
    pub(crate) attributes: Vec<(&'static str, Value)>,
    shapes: Vec<Vec<usize>>,
    values: Vec<Vec<f32>>,
}

impl Example {
    pub(crate) fn new() -> Example {
        Example::of(3)
    }

    pub(crate) fn of(queries: usize) -> Example {
        let shapes = vec![vec![2, queries, 24], vec![2, 5, 12], vec![2, 5, 6], vec![2, queries, 4], vec![2, 1, 1, 5]];
        // Exactly representable in every type.
        let value = |i: usize, j: usize| ((i * 31 + j * 7 + j * j % 5) % 13) as f32 / 8.0 - 0.75;
        let values = shapes.iter().enumerate();
        let values = values.map(|(i, shape)| (0..shape.iter().product()).map(|j| value(i, j)).collect()).collect();
        let attributes = vec![
            ("num_heads", Value::Int(4)),
            ("kv_num_heads", Value::Int(2)),
            ("scale", Value::Float(0.5)),
            ("is_causal", Value::Int(1)),
        ];
        Example { attributes, shapes, values }
    }

    /// A node with the dimensions that `dims` returns: a size, or -1 and a name.
    fn node(&self, dtype: DType, dims: impl Fn(usize, usize) -> (i64, &'static str)) -> Node {
        let info = |(i, shape): (usize, &Vec<usize>)| {
            let dims: Vec<_> = (0..shape.len()).map(|axis| dims(i, axis)).collect();
            Some(Info::new(if i == 3 { DType::F32 } else { dtype }, &dims))
        };
        Node {
            attributes: self.attributes.clone(),
            inputs: self.shapes.iter().enumerate().map(info).collect(),
            output: None,
            constants: Vec::new(),
        }
    }

    pub(crate) fn sized(&self, dtype: DType) -> Node {
        self.node(dtype, |i, axis| (self.shapes[i][axis] as i64, ""))
    }

    /// Makes all numbers of an input the same.
    #[cfg(feature = "cuda")]
    pub(crate) fn fill(&mut self, index: usize, value: f32) {
        self.values[index].fill(value);
    }

    fn tensor(&self, index: usize, dtype: DType, offset: usize) -> Tensor {
        let (shape, values) = (&self.shapes[index], &self.values[index]);
        match dtype {
            _ if index == 3 => Tensor::new(shape, Data::F32(values), offset),
            DType::F32 => Tensor::new(shape, Data::F32(values), offset),
            DType::F16 => {
                Tensor::new(shape, Data::F16(&values.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>()), offset)
            }
            DType::BF16 => {
                Tensor::new(shape, Data::BF16(&values.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>()), offset)
            }
            DType::U8 | DType::I64 => panic!("T is a floating-point type"),
        }
    }

    pub(crate) fn call(&self, dtype: DType, offset: usize) -> Call {
        Call::new(dtype, (0..self.shapes.len()).map(|i| Some(self.tensor(i, dtype, offset))).collect())
    }

    pub(crate) fn expected(&self) -> Vec<f64> {
        let values = self.attributes.clone();
        let get = |name| values.iter().find(|(n, _)| *n == name).map(|(_, value)| value.clone());
        let attributes = Attributes::read(OPERATORS[0], |def| get(def.name)).unwrap();
        let tensors = self.shapes.iter().zip(&self.values);
        let tensors: Vec<_> =
            tensors.map(|(shape, data)| Some(moh_operators::Tensor { shape, data: Data::F32(data) })).collect();
        OPERATORS[0].reference(&attributes, &tensors).unwrap()
    }
}

/// A created kernel, destroyed on drop.
pub(crate) struct Made {
    op: &'static OrtCustomOp,
    kernel: *mut c_void,
}

impl Made {
    fn new(dtype: DType, node: &Node) -> Result<Made, (OrtErrorCode, String)> {
        Made::of(table(OPERATORS[0], dtype), node)
    }

    pub(crate) fn of(op: &'static OrtCustomOp, node: &Node) -> Result<Made, (OrtErrorCode, String)> {
        let mut kernel = ptr::null_mut();
        let node = ptr::from_ref(node).cast();
        let status = unsafe { op.CreateKernelV2.unwrap()(op, &raw const *NEW, node, &raw mut kernel) };
        match outcome(status) {
            None => Ok(Made { op, kernel }),
            Some(error) => Err(error),
        }
    }

    pub(crate) fn run(&self, call: &mut Call) -> Result<Vec<f64>, (OrtErrorCode, String)> {
        self.compute(call).map_or_else(|| Ok(call.output.as_ref().unwrap().values()), Err)
    }

    /// Computes a call, without a look at the output.
    fn compute(&self, call: &mut Call) -> Option<(OrtErrorCode, String)> {
        let status = unsafe { self.op.KernelComputeV2.unwrap()(self.kernel, ptr::from_mut(call).cast()) };
        crate::fake::device::synchronize();
        assert_eq!(call.blocks.load(Ordering::Relaxed), 0, "memory not released");
        outcome(status)
    }
}

// SAFETY: kernels can be called concurrently.
unsafe impl Sync for Made {}

impl Drop for Made {
    fn drop(&mut self) {
        unsafe { self.op.KernelDestroy.unwrap()(self.kernel) }
    }
}

#[test]
fn call_computes_the_operator() {
    let example = Example::new();
    let expected = example.expected();
    assert!(expected.iter().any(|x| x.abs() > 0.1));
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F16, 2e-3), (DType::BF16, 2e-2)] {
        let kernel = Made::new(dtype, &example.sized(dtype)).unwrap();
        // At offset 1 nothing is aligned.
        for offset in [0, 1] {
            let found = kernel.run(&mut example.call(dtype, offset)).unwrap();
            let near = |(a, b): (&f64, &f64)| (a - b).abs() <= tolerance * (1.0 + b.abs());
            assert!(found.len() == expected.len() && found.iter().zip(&expected).all(near), "{dtype} {offset}");
        }
    }
    assert_eq!(live(), 0);
}

#[test]
fn host_error_for_the_output_is_returned() {
    let example = Example::new();
    let kernel = Made::new(DType::F32, &example.sized(DType::F32)).unwrap();
    let mut call = example.call(DType::F32, 0);
    call.no_output = true;
    let (code, message) = kernel.run(&mut call).unwrap_err();
    assert!(code == OrtErrorCode::ORT_FAIL && message.contains("no output"), "{code:?} {message}");
    call.no_output = false;
    assert!(kernel.run(&mut call).is_ok());
    drop(kernel);
    assert_eq!(live(), 0);
}

#[test]
fn empty_input_yields_an_empty_output() {
    let mut example = Example::new();
    for shape in &mut example.shapes {
        shape[0] = 0;
    }
    example.values = vec![Vec::new(); 5];
    let found = Made::new(DType::F32, &example.sized(DType::F32)).unwrap().run(&mut example.call(DType::F32, 0));
    assert_eq!(found, Ok(Vec::new()));
}

#[test]
fn invalid_attributes_fail_when_the_kernel_is_created() {
    let example = Example::new();
    for i in 0..example.attributes.len() {
        let mut node = example.sized(DType::F32);
        let (name, _) = node.attributes.remove(i);
        let (code, message) = Made::new(DType::F32, &node).err().unwrap();
        assert_eq!(code, OrtErrorCode::ORT_INVALID_ARGUMENT);
        assert!(message.contains(&format!("attribute {name}: expected")) && message.contains("nothing"), "{message}");

        let mut node = example.sized(DType::F32);
        node.attributes[i].1 = match node.attributes[i].1 {
            Value::Int(_) => Value::Float(1.0),
            Value::Float(_) | Value::Ints(_) => Value::Int(1),
        };
        let (_, message) = Made::new(DType::F32, &node).err().unwrap();
        assert!(message.contains(&format!("attribute {name}: expected")) && message.contains("(1"), "{message}");
    }
    let mut node = example.sized(DType::F32);
    node.attributes[0].1 = Value::Ints(vec![4]);
    let (_, message) = Made::new(DType::F32, &node).err().unwrap();
    assert!(message.contains("attribute num_heads: expected Int, found Ints([4])"), "{message}");
    // Values are checked even if no rank is known.
    let mut node = example.sized(DType::F32);
    node.attributes[1].1 = Value::Int(3);
    node.inputs.iter_mut().flatten().for_each(|info| (info.sizes, info.names) = Default::default());
    let (_, message) = Made::new(DType::F32, &node).err().unwrap();
    assert!(message.contains("attribute kv_num_heads: expected a divisor"), "{message}");
    assert_eq!(live(), 0);
}

#[test]
fn invalid_shapes_fail_as_soon_as_they_are_known() {
    let example = Example::new();
    let mut node = example.sized(DType::F32);
    node.inputs[2].as_mut().unwrap().sizes[0] = 7;
    let (_, message) = Made::new(DType::F32, &node).err().unwrap();
    assert!(message.contains("input value: expected shape"), "{message}");

    let unknown = example.node(DType::F32, |_, _| (-1, ""));
    let kernel = Made::new(DType::F32, &unknown).unwrap();
    for (index, shape, expected) in [
        (2, vec![7, 5, 6], "input value: expected shape"),
        (0, vec![6, 24], "input query: expected shape"),
        (3, vec![], "input head_gates: expected shape"),
        (1, vec![1; 17], "input key: expected shape at most 16 dimensions"),
    ] {
        let mut call = example.call(DType::F32, 0);
        let values = vec![0.0; shape.iter().product()];
        call.inputs[index] = Some(Tensor::new(&shape, Data::F32(&values), 0));
        let (code, message) = kernel.run(&mut call).unwrap_err();
        assert_eq!(code, OrtErrorCode::ORT_INVALID_ARGUMENT);
        assert!(message.contains(expected), "{message}");
        assert!(call.output.is_none());
    }
    let mut call = example.call(DType::F32, 0);
    call.inputs[1] = Some(example.tensor(1, DType::F16, 0));
    let (_, message) = kernel.run(&mut call).unwrap_err();
    assert!(message.contains("input key: expected element type float32, found float16"), "{message}");
    call.inputs[1] = None;
    let (_, message) = kernel.run(&mut call).unwrap_err();
    assert!(message.contains("expected 4 to 5, found 4 inputs"), "{message}");
    drop(kernel);
    assert_eq!(live(), 0);
}

fn infer(node: &mut Node) -> Option<(OrtErrorCode, String)> {
    let op = table(OPERATORS[0], DType::F32);
    outcome(unsafe { op.InferOutputShapeFn.unwrap()(op, ptr::from_mut(node).cast()) })
}

#[test]
fn shape_inference_keeps_symbols() {
    let example = Example::new();
    let symbols = |i: usize, axis| match (i, axis) {
        (_, 0) => (-1, "batch"),
        (0 | 3, 1) => (-1, "sequence"),
        (1 | 2, 1) | (4, 3) => (-1, "total"),
        (i, axis) => (example.shapes[i][axis] as i64, ""),
    };
    // The registration for f32, the first one, is called for all types.
    for dtype in DType::ALL {
        let mut node = example.node(dtype, symbols);
        assert_eq!(infer(&mut node), None);
        assert_eq!(node.output, Some(Info::new(dtype, &[(-1, "batch"), (-1, "sequence"), (12, "")])));
    }
    assert_eq!(live(), 0);
}

#[test]
fn shape_inference_sets_no_shape_if_a_dimension_is_unknown() {
    let example = Example::new();
    // A dimension without a name.
    let mut node =
        example.node(DType::F32, |i, axis| if axis == 1 { (-1, "") } else { (example.shapes[i][axis] as i64, "") });
    assert_eq!(infer(&mut node), None);
    assert_eq!(node.output, None);
    // An unknown rank.
    let mut node = example.sized(DType::F32);
    node.inputs[1] = Some(Info::new(DType::F32, &[]));
    assert_eq!(infer(&mut node), None);
    assert_eq!(node.output, None);
    // A bias that is a scalar or of unknown rank is accepted.
    let mut node = example.sized(DType::F32);
    node.inputs[4] = Some(Info::new(DType::F32, &[]));
    assert_eq!(infer(&mut node), None);
    assert_eq!(node.output, Some(Info::sized(DType::F32, &[2, 3, 12])));
    // Invalid shapes are still reported.
    let mut node = example.sized(DType::F32);
    node.inputs[3] = Some(Info::sized(DType::F32, &[2, 3, 5]));
    assert!(infer(&mut node).unwrap().1.contains("input head_gates"));
    assert_eq!(live(), 0);
}

/// Such as the output of a node whose dimensions have no names, as the residual of another.
#[test]
fn shape_inference_goes_without_optional_inputs_of_unknown_rank() {
    let linear = OPERATORS.iter().copied().find(|operator| operator.name == Linear::NAME).unwrap();
    let rows = |width| Info::new(DType::F32, &[(-1, "batch"), (-1, "sequence"), (width, "")]);
    let unknown = || Info::new(DType::F32, &[]);
    let infer = |weight: &[usize], gate| {
        let inputs = [rows(24), Info::sized(DType::F32, weight), unknown(), gate, unknown()].map(Some).to_vec();
        let mut node = Node { attributes: Vec::new(), inputs, output: None, constants: Vec::new() };
        let op = table(linear, DType::F32);
        let refusal = outcome(unsafe { op.InferOutputShapeFn.unwrap()(op, ptr::from_mut(&mut node).cast()) });
        (refusal.map(|(_, message)| message), node.output)
    };
    assert_eq!(infer(&[24, 12], unknown()), (None, Some(rows(12))));
    assert_eq!(infer(&[24, 12], rows(12)), (None, Some(rows(12))));
    // What is known is checked.
    assert!(infer(&[23, 12], unknown()).0.unwrap().contains("input weight"));
    assert!(infer(&[24, 12], rows(13)).0.unwrap().contains("input gate"));
    assert_eq!(live(), 0);
}

#[test]
fn shape_inference_knows_outputs_of_another_type_than_the_inputs() {
    let router = OPERATORS.iter().copied().find(|operator| operator.name == TopKRouter::NAME).unwrap();
    let attributes = [
        ("kind", Value::Int(1)),
        ("num_heads", Value::Int(4)),
        ("top_k", Value::Int(2)),
        ("shared_heads", Value::Ints(Vec::new())),
    ];
    for dtype in DType::ALL {
        let scores = Info::new(dtype, &[(-1, "batch"), (-1, "sequence"), (4, "")]);
        let mut node =
            Node { attributes: attributes.to_vec(), inputs: vec![Some(scores)], output: None, constants: Vec::new() };
        let op = table(router, DType::F32);
        let refusal = outcome(unsafe { op.InferOutputShapeFn.unwrap()(op, ptr::from_mut(&mut node).cast()) });
        assert_eq!(refusal, None);
        assert_eq!(node.output, Some(Info::new(DType::F32, &[(-1, "batch"), (-1, "sequence"), (4, "")])));
    }
    assert_eq!(live(), 0);
}

/// Runs `body` as the kernel of one call and returns its result as the host sees it.
fn hosted(call: &mut Call, body: impl FnOnce(&dyn Host) -> Result<(), Failure>) -> Option<(OrtErrorCode, String)> {
    let context = unsafe { KernelContext::new(api(), ptr::from_mut(call).cast()) };
    outcome(guard(api(), || {
        let memory = CpuMemory::new(api())?;
        body(&SessionHost::new(&context, &memory, &SessionThreads::new(), Precision::Highest))
    }))
}

#[test]
fn each_task_runs_once() {
    let counts: Vec<AtomicUsize> = (0..9).map(|_| AtomicUsize::new(0)).collect();
    let status = hosted(&mut Call::new(DType::F32, Vec::new()), |host| {
        for tasks in [0, 1, 9] {
            host.parallel_for(tasks, &|i| {
                counts[i].fetch_add(1, Ordering::Relaxed);
            });
        }
        Ok(())
    });
    assert_eq!(status, None);
    let counts: Vec<usize> = counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
    assert_eq!(counts, [2, 1, 1, 1, 1, 1, 1, 1, 1]);
}

#[test]
fn panics_become_errors() {
    let (code, message) = outcome(guard(api(), || panic!("on purpose {}", 7))).unwrap();
    assert_eq!(code, OrtErrorCode::ORT_RUNTIME_EXCEPTION);
    assert!(message.contains("on purpose 7"), "{message}");

    let ran = AtomicUsize::new(0);
    let status = hosted(&mut Call::new(DType::F32, Vec::new()), |host| {
        let _scratch = Scratch::new::<f32>(host, 10)?;
        host.parallel_for(8, &|i| match i {
            2 | 5 => panic!("in task"),
            _ => {
                ran.fetch_add(1, Ordering::Relaxed);
            }
        });
        unreachable!()
    });
    assert!(status.unwrap().1.contains("in task"));
    assert_eq!(ran.into_inner(), 6);
    assert_eq!(live(), 0);
}

#[test]
fn failure_of_the_hosts_threads_is_an_error() {
    let mut call = Call::new(DType::F32, Vec::new());
    call.broken_threads = true;
    let status = hosted(&mut call, |host| {
        host.parallel_for(2, &|_| ());
        unreachable!()
    });
    assert!(status.unwrap().1.contains("no threads"));
    assert_eq!(live(), 0);
}

#[test]
fn scratch_memory_comes_from_the_session() {
    let mut call = Call::new(DType::F32, Vec::new());
    let blocks = ptr::from_ref(&call.blocks);
    let status = hosted(&mut call, |host| {
        let mut scratch = [Scratch::new::<f32>(host, 1000)?, Scratch::new::<f32>(host, 0)?];
        assert_eq!(unsafe { &*blocks }.load(Ordering::Relaxed), 2);
        assert!(scratch[0].as_mut_slice::<f32>().iter().all(|&x| x == 0.0));
        drop(scratch);
        assert_eq!(unsafe { &*blocks }.load(Ordering::Relaxed), 0);
        Scratch::new::<f32>(host, isize::MAX as usize / 8).map(drop)?;
        Ok(())
    });
    assert!(status.unwrap().1.contains("no memory for"));
    assert_eq!(live(), 0);
}
