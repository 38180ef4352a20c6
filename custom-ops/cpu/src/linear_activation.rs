//! LinearActivation on a CPU: as Linear.

use crate::epilogue::Epilogue;
use crate::isa::{Isa, MatrixUnit};
use crate::kernel::{self, CpuOperator, ToPack, Work};
use crate::linear::{self, Layer};
use crate::packed::Packed;
use crate::settings::Precision;
use moh_operators::linear_activation::{Inputs, Problem};
use moh_operators::{Element, Error, LinearActivation};

impl CpuOperator for LinearActivation {
    type Output<T: Element> = T;

    fn uses(_: MatrixUnit) -> bool {
        true
    }

    fn run<I: Isa, T: Element>(call: kernel::Call<'_, Self, I, T>) -> Result<Work, Error> {
        let kernel::Call { isa, unit, problem, inputs, output, host } = call;
        let (Inputs { x, weight, bias }, Problem { linear: problem, activation }) = (inputs, problem);
        let epilogue = Epilogue::activation(problem.out_width, *activation);
        Layer { isa, unit, problem, x, weight, bias, epilogue }.run(output, host)
    }

    fn is_left_to_body<I: Isa>(unit: Option<MatrixUnit>, precision: Precision, packs: bool) -> bool {
        linear::is_left_to_body::<I>(unit, precision, packs)
    }

    fn pack<I: Isa, T: Element>(isa: I, of: &ToPack<'_, Self, T>) -> Result<Option<Packed>, Error> {
        linear::pack(isa, of)
    }
}
