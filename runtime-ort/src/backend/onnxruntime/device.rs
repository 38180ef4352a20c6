//! CUDA: the provider, and outputs that stay on the GPU because they go back in.

use crate::info::TensorInfo;
use crate::names;
use crate::options::{DeviceChoice, Notice};
use ort::ep::{CUDA, ExecutionProvider};
use ort::memory::{AllocationDevice, AllocatorType, MemoryInfo, MemoryType};
use ort::session::builder::SessionBuilder;
use ort::session::{RunOptions, Session, SessionInputValue};
use ort::value::{DynTensor, DynValue};

/// Whether the loaded onnxruntime has a CUDA provider.
pub(crate) fn cuda_provider() -> bool {
    CUDA::is_available().unwrap_or(false)
}

/// Adds the CUDA provider where it is asked for and there; says whether it is.
pub(super) fn choose(
    builder: SessionBuilder,
    device: DeviceChoice,
    notices: &mut Vec<Notice>,
) -> ort::Result<(SessionBuilder, bool)> {
    let required = device == DeviceChoice::Cuda;
    if !required && (device == DeviceChoice::Cpu || !cuda_provider()) {
        return Ok((builder, false));
    }
    match builder.with_execution_providers([CUDA::default().build().error_on_failure()]) {
        Ok(builder) => Ok((builder, true)),
        Err(error) if required => Err(error.into()),
        Err(error) => {
            notices.push(Notice::NoCuda { reason: error.message().to_owned() });
            Ok((error.recover(), false))
        }
    }
}

/// Names of a model's inputs and outputs, and where its outputs go.
pub(super) struct Binding {
    inputs: Vec<String>,
    /// With whether the output stays on the device.
    outputs: Vec<(String, bool)>,
    device: MemoryInfo<'static>,
    host: MemoryInfo<'static>,
}

impl Binding {
    /// Keeps caches on the GPU, `present.*`, and brings everything else to ordinary memory.
    pub(super) fn cuda(inputs: &[TensorInfo], outputs: &[TensorInfo]) -> ort::Result<Binding> {
        let stays = |output: &TensorInfo| output.name.starts_with(names::PRESENT);
        Binding::new(AllocationDevice::CUDA, inputs, outputs, stays)
    }

    fn new(
        device: AllocationDevice<'static>,
        inputs: &[TensorInfo],
        outputs: &[TensorInfo],
        stays: impl Fn(&TensorInfo) -> bool,
    ) -> ort::Result<Binding> {
        let memory = |device| MemoryInfo::new(device, 0, AllocatorType::Device, MemoryType::Default);
        Ok(Binding {
            inputs: inputs.iter().map(|input| input.name.clone()).collect(),
            outputs: outputs.iter().map(|output| (output.name.clone(), stays(output))).collect(),
            device: memory(device)?,
            host: memory(AllocationDevice::CPU)?,
        })
    }

    /// Brings every output to ordinary memory.
    pub(super) fn host(inputs: &[TensorInfo], outputs: &[TensorInfo]) -> ort::Result<Binding> {
        Binding::new(AllocationDevice::CPU, inputs, outputs, |_| false)
    }

    /// Runs the session on inputs in the model's order, wherever they are; gives its outputs in theirs. Those of `shared`, (input,
    /// output, value), are written where the input is.
    pub(super) fn run(
        &self,
        session: &mut Session,
        inputs: &[Option<SessionInputValue<'_>>],
        shared: &mut [(usize, usize, &mut DynTensor)],
        options: Option<&RunOptions>,
    ) -> ort::Result<Vec<(&str, DynValue)>> {
        let mut binding = session.create_binding()?;
        for (name, value) in self.inputs.iter().zip(inputs) {
            if let Some(value) = value {
                binding.bind_input(name, value)?;
            }
        }
        for (input, _, value) in &*shared {
            binding.bind_input(&self.inputs[*input], &**value)?;
        }
        for (i, (name, stays)) in self.outputs.iter().enumerate() {
            match shared.iter_mut().find(|(_, output, _)| *output == i) {
                Some((_, _, value)) => binding.bind_output(name, &mut **value)?,
                None => binding.bind_output_to_device(name, if *stays { &self.device } else { &self.host })?,
            }
        }
        let mut outputs = match options {
            Some(options) => session.run_binding_with_options(&binding, options)?,
            None => session.run_binding(&binding)?,
        };
        let take = |(name, _): &'_ (String, bool)| {
            let missing = || ort::Error::new(format!("the run gave no output {name}"));
            outputs.remove(name).ok_or_else(missing)
        };
        let taken = self.outputs.iter().map(take).collect::<ort::Result<Vec<DynValue>>>()?;
        Ok(self.outputs.iter().map(|(name, _)| name.as_str()).zip(taken).collect())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::backend::environment::environment;
    use crate::element::ElementType;
    use crate::info::Dim;
    use ort::value::Tensor;

    /// A protobuf field of bytes.
    fn field(number: u8, content: &[u8]) -> Vec<u8> {
        [&[number << 3 | 2, content.len() as u8], content].concat()
    }

    /// A model of two nodes: `present.0` and `logits` are `x`, a float vector.
    fn model() -> Vec<u8> {
        let value = |name: &str| [field(1, name.as_bytes()), field(2, &field(1, &[1 << 3, 1]))].concat();
        let node = |to: &str| [field(1, b"x"), field(2, to.as_bytes()), field(4, b"Identity")].concat();
        let outputs = ["present.0", "logits"];
        let nodes: Vec<u8> = outputs.iter().flat_map(|output| field(1, &node(output))).collect();
        let values: Vec<u8> = outputs.iter().flat_map(|output| field(12, &value(output))).collect();
        let graph = [nodes, field(2, b"g"), field(11, &value("x")), values].concat();
        [vec![1 << 3, 8], field(7, &graph), field(8, &[2 << 3, 13])].concat()
    }

    #[test]
    fn bound_outputs_come_in_the_models_order() {
        let Ok(environment) = environment(None) else {
            println!("SKIPPED: no onnxruntime");
            return;
        };
        let mut session = Session::builder(&environment).unwrap().commit_from_memory(&model()).unwrap();
        let info = |name: &str| TensorInfo {
            name: name.to_owned(),
            element_type: ElementType::F32,
            dims: vec![Dim::Symbol(String::new())],
        };
        let outputs = [info("present.0"), info("logits")];
        // The CPU stands for the GPU.
        let binding =
            Binding::new(AllocationDevice::CPU, &[info("x")], &outputs, |output| output.name != "logits").unwrap();
        assert_eq!(binding.outputs, [("present.0".to_owned(), true), ("logits".to_owned(), false)]);
        for x in [vec![1f32, 2.0], vec![3.0]] {
            let input = Tensor::from_array(([x.len()], x.clone())).unwrap();
            let found = binding.run(&mut session, &[Some(SessionInputValue::from(input))], &mut [], None).unwrap();
            let names: Vec<&str> = found.iter().map(|(name, _)| *name).collect();
            assert_eq!(names, ["present.0", "logits"]);
            for (_, value) in &found {
                assert_eq!(value.try_extract_tensor::<f32>().unwrap().1, x);
            }
        }
    }
}
