//! A packed weight is accepted only for the problem and the instruction set that it was packed for.

use crate::support::{kernels_of, pack};
use moh_conformance::Buffer;
use moh_conformance::head_linear::{COMBINE, Case, Gates, PROJECTION};
use moh_cpu::{Input, Kernel, Packed, Packing, Threads};
use moh_operators::{DType, DataMut, Error};

/// Index of the weight among the inputs.
const WEIGHT: usize = 1;

fn packed(case: &Case, kernel: &Kernel) -> Packed {
    pack(&case.call(), kernel).remove(WEIGHT).unwrap()
}

/// The kernels that pack the weight: those of matrix units read it as it is.
fn packing(case: &Case) -> impl Iterator<Item = &'static Kernel> {
    kernels_of(case.operator).filter(|kernel| pack(&case.call(), kernel)[WEIGHT].is_some())
}

/// Runs `case` with `packed` as the weight.
fn run_with(case: &Case, kernel: &Kernel, packed: &Packed) -> Result<Vec<f64>, Error> {
    let call = case.call();
    let mut inputs: Vec<_> = call.tensors().into_iter().map(|tensor| tensor.map(Input::from)).collect();
    inputs[WEIGHT] = Some(Input::Packed(packed));
    let columns = if case.is_projection() { case.heads * case.block } else { case.width };
    let mut output = Buffer::new(DType::F32, &vec![f32::NAN; case.tokens() * columns]);
    kernel.run(&call.attributes, &inputs, output.data_mut(), &Threads::new(1))?;
    Ok(output.values(kernel))
}

/// Cases whose weights have the same 768 elements: 16 x 48 and 48 x 16. (Not a projection to one head: it is packed
/// exactly like a combination of that shape.)
fn cases() -> Vec<Case> {
    let all = |case: Case| Case { q_len: 20, gates: Gates::On, ..case };
    vec![
        all(Case { heads: 3, block: 16, width: 16, ..PROJECTION }),
        all(Case { heads: 2, block: 24, width: 16, ..PROJECTION }),
        all(Case { heads: 2, block: 8, width: 48, ..PROJECTION }),
        all(Case { heads: 3, block: 16, width: 16, ..COMBINE }),
    ]
}

#[test]
fn weight_packed_for_another_problem_is_refused() {
    for (i, of) in cases().iter().enumerate() {
        for kernel in packing(of) {
            let packed = packed(of, kernel);
            run_with(of, kernel, &packed).unwrap();
            for (_, other) in cases().iter().enumerate().filter(|(j, _)| *j != i) {
                let kernel = kernels_of(other.operator).find(|found| found.isa == kernel.isa).unwrap();
                match run_with(other, kernel, &packed) {
                    Err(Error::Packed { operator, input } | Error::Shape { operator, input, .. }) => {
                        assert_eq!((operator, input), (other.operator.name, other.operator.inputs[WEIGHT].name));
                    }
                    found => panic!("{kernel:?}: packed for {of:?}, used for {other:?}: {found:?}"),
                }
            }
        }
    }
}

#[test]
fn weight_beside_the_packed_form_of_another_is_refused() {
    let all = |case: Case| Case { q_len: 20, gates: Gates::On, ..case };
    let of = all(Case { heads: 3, block: 16, width: 16, ..PROJECTION });
    for kernel in packing(&of) {
        let call = of.call();
        let run = |packed: &Packed| {
            let mut inputs: Vec<_> = call.tensors().into_iter().map(|tensor| tensor.map(Input::from)).collect();
            inputs[WEIGHT] = Some(Input::Both(call.tensors()[WEIGHT].unwrap(), packed));
            let mut output = vec![f32::NAN; of.tokens() * 48];
            kernel.run(&call.attributes, &inputs, DataMut::F32(&mut output), &Threads::new(1))
        };
        run(&packed(&of, kernel)).unwrap();
        for other in [all(Case { heads: 2, block: 8, width: 48, ..PROJECTION }), Case { dtype: DType::F16, ..of }] {
            let Some(packed) = pack(&other.call(), kernel).remove(WEIGHT) else { continue };
            let Err(error) = run(&packed) else { panic!("{kernel:?}, {other:?}") };
            assert!(matches!(error, Error::Packed { input: "weight", .. }), "{kernel:?}: {error}");
        }
    }
}

#[test]
fn weight_of_wrong_length_is_not_packed() {
    for case in cases() {
        let mut call = case.call();
        let elements = call.inputs[WEIGHT].0.iter().product::<usize>();
        for wrong in [0, elements - 1, elements + 1] {
            call.inputs[WEIGHT].1 = Buffer::new(DType::F32, &vec![0.5; wrong]);
            for kernel in kernels_of(case.operator) {
                match kernel.pack(&call.attributes, WEIGHT, call.tensors()[WEIGHT].unwrap(), Packing::default()) {
                    Err(Error::Length { tensor: "weight", found, .. }) => assert_eq!(found, wrong, "{kernel:?}"),
                    other => panic!("{kernel:?}: {other:?}"),
                }
            }
        }
    }
}

/// Instruction sets with equal vector and tile sizes may share packed weights.
#[test]
fn weight_packed_for_another_instruction_set_is_refused() {
    let case = cases()[0];
    let (mut refused, kernels) = (0, packing(&case).count());
    for one in packing(&case) {
        let packed_for_one = packed(&case, one);
        for other in packing(&case).filter(|other| other.isa != one.isa) {
            match run_with(&case, other, &packed_for_one) {
                Err(Error::Packed { .. }) => refused += 1,
                Ok(found) => {
                    let expected = run_with(&case, other, &packed(&case, other)).unwrap();
                    assert_eq!(found, expected, "packed for {one:?}, used by {other:?}");
                }
                Err(error) => panic!("packed for {one:?}, used by {other:?}: {error}"),
            }
        }
    }
    // NEON and the portable set have the same vector length.
    assert!(refused > 0 || kernels == 1 || cfg!(target_arch = "aarch64"));
}
