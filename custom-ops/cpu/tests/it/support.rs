//! Runs conformance calls on CPU kernels, with a host that counts allocations.

use moh_conformance::{Buffer, Call};
use moh_cpu::{Host, Input, Kernel, Packed, Packing, Precision, Threads, Work};
use moh_operators::{Error, Operator};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

/// An operator's kernels that this processor supports.
pub(crate) fn kernels_of(operator: &'static Operator) -> impl Iterator<Item = &'static Kernel> {
    moh_cpu::kernels().filter(move |kernel| kernel.operator == operator && (kernel.supported)())
}

/// The output of `kernel`, written to `len` elements that start as NaN. Panics if the kernel writes out of bounds.
pub(crate) fn run(call: &Call, kernel: &Kernel, len: usize, host: &dyn Host) -> Result<(Vec<f64>, Work), Error> {
    let inputs: Vec<_> = call.tensors().into_iter().map(|tensor| tensor.map(Input::from)).collect();
    run_on(call, &inputs, kernel, len, host)
}

pub(crate) fn run_on(
    call: &Call,
    inputs: &[Option<Input<'_>>],
    kernel: &Kernel,
    len: usize,
    host: &dyn Host,
) -> Result<(Vec<f64>, Work), Error> {
    let mut output = Buffer::unwritten(call.output_dtype(), len);
    let work = kernel.run(&call.attributes, inputs, output.data_mut(), host)?;
    Ok((output.values(kernel), work))
}

/// Packs all inputs that `kernel` packs for a host that drops the tensors.
pub(crate) fn pack(call: &Call, kernel: &Kernel) -> Vec<Option<Packed>> {
    pack_for(call, kernel, Packing::default())
}

/// Packs all inputs that `kernel` packs.
pub(crate) fn pack_for(call: &Call, kernel: &Kernel, packing: Packing) -> Vec<Option<Packed>> {
    let tensors = call.tensors().into_iter().enumerate();
    tensors.map(|(i, tensor)| kernel.pack(&call.attributes, i, tensor?, packing).unwrap()).collect()
}

/// For a host that keeps the tensors.
pub(crate) const BESIDE: Packing = Packing { precision: Precision::Highest, beside: true, all: true };

/// Runs every kernel that this processor supports with these numbers of threads, on plain and on packed inputs, in place of and beside the plain ones. Panics
/// if a result differs from the reference, or from the result with another number of threads. `exact` selects the
/// elements that must be equal. Returns the work on plain inputs.
pub(crate) fn check(call: &Call, threads: &[usize], exact: impl Fn(usize) -> bool) -> Vec<Work> {
    check_as(call, |_| call, threads, exact)
}

/// As [`check`], with the tolerance of another call, which may depend on the kernel.
pub(crate) fn check_as<'c>(
    call: &Call,
    judge: impl Fn(&Kernel) -> &'c Call,
    threads: &[usize],
    exact: impl Fn(usize) -> bool,
) -> Vec<Work> {
    let expected = call.expected();
    let mut works = Vec::new();
    for kernel in kernels_of(call.operator()) {
        let judge = judge(kernel);
        let (packed, beside) = (pack(call, kernel), pack_for(call, kernel, BESIDE));
        let tensors = || call.tensors().into_iter().map(|tensor| tensor.map(Input::from));
        let mut ways = vec![("", tensors().collect::<Vec<_>>())];
        if packed.iter().any(Option::is_some) {
            ways.push((", packed", tensors().zip(&packed).map(in_place).collect()));
        }
        if beside.iter().any(Option::is_some) {
            ways.push((", packed beside", with_packed(call, &beside)));
        }
        for (way, inputs) in &ways {
            let mut first: Option<(Vec<f64>, Work)> = None;
            for &threads in threads {
                let name = format!("{kernel:?}{way}, {threads} threads");
                let (found, work) = run_on(call, inputs, kernel, expected.len(), &Threads::new(threads))
                    .unwrap_or_else(|error| panic!("{name}: {error}"));
                judge.compare(&name, &found, &expected, &exact);
                match &first {
                    Some((other, _)) => {
                        assert!(*other == found, "{kernel:?}{way}: {threads} threads change the result")
                    }
                    None => first = Some((found, work)),
                }
            }
            works.extend(first.filter(|_| way.is_empty()).map(|(_, work)| work));
        }
    }
    works
}

/// The packed weight, if any, in place of the tensor.
fn in_place<'a>((tensor, packed): (Option<Input<'a>>, &'a Option<Packed>)) -> Option<Input<'a>> {
    packed.as_ref().map(Input::Packed).or(tensor)
}

/// The inputs with what was packed of them.
pub(crate) fn with_packed<'a>(call: &'a Call, packed: &'a [Option<Packed>]) -> Vec<Option<Input<'a>>> {
    let both = |(tensor, packed): (Option<_>, &'a Option<Packed>)| match (tensor, packed) {
        (Some(tensor), Some(packed)) => Some(Input::Both(tensor, packed)),
        (tensor, _) => tensor.map(Input::from),
    };
    call.tensors().into_iter().zip(packed).map(both).collect()
}

/// Threads with a precision of their own.
pub(crate) struct AtPrecision(pub(crate) Threads, pub(crate) Precision);

// SAFETY: memory comes from `Threads`.
unsafe impl Host for AtPrecision {
    fn parallelism(&self) -> usize {
        self.0.parallelism()
    }
    fn parallel_for(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.0.parallel_for(tasks, task);
    }
    fn precision(&self) -> Precision {
        self.1
    }
    fn allocate(&self, bytes: usize) -> Option<NonNull<u8>> {
        self.0.allocate(bytes)
    }
    unsafe fn release(&self, ptr: NonNull<u8>, bytes: usize) {
        // SAFETY: the caller's contract.
        unsafe { self.0.release(ptr, bytes) }
    }
}

/// Runs every kernel at every precision on `call`, of outputs of about 1. The errors must be those of the precision, with any number of
/// threads; those of vectors do not depend on it. `packing_rounds`: whether a packed weight may be cut for matrix units where the plain one is not, so
/// that results are rounded otherwise. Then a number of one of `inputs` is made infinite, or too large to be rounded:
/// the outputs must be as infinite as the reference.
pub(crate) fn check_precisions(mut call: Call, inputs: &[usize], packing_rounds: bool) {
    let rms = |numbers: &[f64]| (numbers.iter().map(|x| x * x).sum::<f64>() / numbers.len() as f64).sqrt();
    let expected = call.expected();
    let mut lower = 0;
    for kernel in kernels_of(call.operator()) {
        let mut exact = None;
        for (precision, least, most) in
            [(Precision::Highest, 0.0, 1e-6), (Precision::High, 2e-6, 1e-4), (Precision::Medium, 5e-4, 5e-3)]
        {
            let host = |threads| AtPrecision(Threads::new(threads), precision);
            let run = |threads| run(&call, kernel, expected.len(), &host(threads));
            let found = run(1).unwrap().0;
            assert!(found == run(3).unwrap().0, "{kernel:?}: threads change the result at {}", precision.name());
            let packed = pack_for(&call, kernel, Packing { precision, ..BESIDE });
            let packed = run_on(&call, &with_packed(&call, &packed), kernel, expected.len(), &host(2)).unwrap().0;
            let error_of = |found: &[f64]| {
                rms(&found.iter().zip(&expected).map(|(x, y)| x - y).collect::<Vec<_>>()) / rms(&expected)
            };
            let error = error_of(&found);
            match packing_rounds {
                true => assert!(error_of(&packed) < 1.1 * error + 1e-7, "{kernel:?}, packed, at {}", precision.name()),
                false => assert!(found == packed, "{kernel:?}: packing changes the result at {}", precision.name()),
            }
            if *exact.get_or_insert(found.clone()) == found {
                assert!(error < 1e-6, "{kernel:?} at {}: {error}", precision.name());
            } else {
                assert!((least..most).contains(&error), "{kernel:?} at {}: {error}", precision.name());
                lower += 1;
            }
        }
    }
    // The precisions at which a matrix unit takes less time than vectors, but for the highest.
    let units = kernels_of(call.operator()).map(|kernel| match kernel.isa {
        "amx" => 2,
        "avx512bf16" => 1,
        _ => 0,
    });
    assert_eq!(lower, units.sum::<usize>());
    for poison in [f32::INFINITY, f32::from_bits(0x7fff_ffff), 3.4e38] {
        for &input in inputs {
            let before = std::mem::replace(&mut call.inputs[input].1.numbers_mut()[0], poison);
            let (expected, classes) =
                (call.expected(), |x: &[f64]| x.iter().map(|&x| (x as f32).is_finite()).collect::<Vec<_>>());
            for kernel in kernels_of(call.operator()) {
                for (_, precision) in Precision::NAMES {
                    let host = AtPrecision(Threads::new(2), precision);
                    let found = run(&call, kernel, expected.len(), &host).unwrap().0;
                    assert_eq!(classes(&found), classes(&expected), "{kernel:?} at {}, {poison}", precision.name());
                    let packed = pack_for(&call, kernel, Packing { precision, ..BESIDE });
                    let found = run_on(&call, &with_packed(&call, &packed), kernel, expected.len(), &host).unwrap().0;
                    let name = format!("{kernel:?}, packed, at {}, {poison}", precision.name());
                    assert_eq!(classes(&found), classes(&expected), "{name}");
                }
            }
            call.inputs[input].1.numbers_mut()[0] = before;
        }
    }
}

/// Counts allocated memory, and can refuse allocations.
pub(crate) struct Accounts {
    threads: Threads,
    pub(crate) outstanding: AtomicUsize,
    pub(crate) peak: AtomicUsize,
    limit: usize,
}

impl Accounts {
    pub(crate) fn new(limit: usize) -> Accounts {
        let (outstanding, peak) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Accounts { threads: Threads::new(2), outstanding, peak, limit }
    }
}

// SAFETY: memory comes from `Threads`.
unsafe impl Host for Accounts {
    fn parallelism(&self) -> usize {
        self.threads.parallelism()
    }
    fn parallel_for(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        assert!(tasks <= self.parallelism());
        self.threads.parallel_for(tasks, task);
    }
    fn allocate(&self, bytes: usize) -> Option<NonNull<u8>> {
        let outstanding = self.outstanding.fetch_add(bytes, Ordering::SeqCst) + bytes;
        self.peak.fetch_max(outstanding, Ordering::SeqCst);
        if outstanding > self.limit {
            self.outstanding.fetch_sub(bytes, Ordering::SeqCst);
            return None;
        }
        self.threads.allocate(bytes)
    }
    unsafe fn release(&self, ptr: NonNull<u8>, bytes: usize) {
        self.outstanding.fetch_sub(bytes, Ordering::SeqCst);
        // SAFETY: the caller's contract.
        unsafe { self.threads.release(ptr, bytes) }
    }
}
