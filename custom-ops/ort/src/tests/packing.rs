//! Weights that the host has mapped from a file.

use super::*;
use crate::pages;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;

const WIDTH: usize = 256;
const HEADS: usize = 2;
const BLOCK: usize = 64;
const PAGE: usize = 4096;
/// The weight does not begin with a page.
const OFFSET: usize = PAGE + 64;
/// Of the weight.
const BYTES: usize = HEADS * BLOCK * WIDTH * size_of::<f32>();

fn number(i: usize) -> f32 {
    ((i * 31) % 11) as f32 / 8.0 - 0.5
}

/// Memory that the system has from a file, or that it has from nowhere.
struct Mapped {
    start: *mut u8,
    len: usize,
}

impl Mapped {
    fn new(file: Option<&File>) -> Mapped {
        let len = OFFSET + BYTES;
        let (flags, file) = match file {
            Some(file) => (libc::MAP_PRIVATE, file.as_raw_fd()),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        // As onnxruntime does it.
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let start = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, file, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        Mapped { start: start.cast(), len }
    }

    fn weight(&self) -> *mut f32 {
        self.start.wrapping_add(OFFSET).cast()
    }

    /// How many of the weight's pages are in the process.
    fn resident(&self) -> usize {
        pages::resident(self.weight().cast_const().cast(), BYTES).unwrap()
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

fn file() -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[0; OFFSET]).unwrap();
    (0..BYTES / size_of::<f32>()).for_each(|i| file.write_all(&number(i).to_ne_bytes()).unwrap());
    file
}

/// A projection with this weight, made for a session without entries. The weight is written over before it runs, if `over`: is the result right?
fn projects(mapped: &Mapped, over: bool) -> bool {
    let shapes = [vec![1, 3, WIDTH], vec![HEADS * BLOCK, WIDTH], vec![1, 3, HEADS]];
    let weight = Tensor::at(&shapes[1], DType::F32, mapped.start.wrapping_add(OFFSET));
    let node = Node {
        attributes: vec![("num_heads", Value::Int(HEADS as i64)), ("weight_layout", Value::Int(0))],
        inputs: shapes.iter().map(|shape| Some(Info::sized(DType::F32, shape))).collect(),
        output: None,
        constants: vec![(1, &raw const weight)],
    };
    let (options, status) = register(&HOST);
    assert_eq!(status, None);
    let table = table_of(&options, None, RoutedProjection::OPERATOR, DType::F32).unwrap();
    let kernel = Made::of(table, &node).unwrap();
    if over {
        unsafe { mapped.weight().write_bytes(0, BYTES / size_of::<f32>()) };
    }
    let x: Vec<f32> = (0..3 * WIDTH).map(|i| number(7 * i + 3)).collect();
    let again = Tensor::at(&shapes[1], DType::F32, mapped.start.wrapping_add(OFFSET));
    let [x_tensor, gates] =
        [(0, &x[..]), (2, &[1.0; 3 * HEADS][..])].map(|(i, data)| Tensor::new(&shapes[i], Data::F32(data), 0));
    let found = kernel.run(&mut Call::new(DType::F32, vec![Some(x_tensor), Some(again), Some(gates)])).unwrap();
    found.iter().enumerate().all(|(i, found)| {
        let (row, column) = (i / (HEADS * BLOCK), i % (HEADS * BLOCK));
        let products = (0..WIDTH).map(|k| f64::from(x[row * WIDTH + k]) * f64::from(number(column * WIDTH + k)));
        (found - products.sum::<f64>()).abs() < 1e-4
    })
}

/// Whether the processor's kernel packs projections: a matrix unit's does not.
fn packs() -> bool {
    let attributes = [("num_heads", Value::Int(1)), ("weight_layout", Value::Int(0))];
    let get = |name| attributes.iter().find(|(n, _)| *n == name).map(|(_, value)| value.clone());
    let attributes = Attributes::read(RoutedProjection::OPERATOR, |def| get(def.name)).unwrap();
    let weight = moh_operators::Tensor { shape: &[16, 16], data: Data::F32(&[0.0; 256]) };
    moh_cpu::pack(&attributes, 1, weight, moh_cpu::Packing::default()).unwrap().is_some()
}

#[test]
fn what_is_packed_takes_the_place_of_a_files_pages() {
    if !pages::can_tell() || !packs() {
        return;
    }
    let (file, pages_of_weight) = (file(), BYTES / PAGE + 1);
    let mapped = Mapped::new(Some(&file));
    assert!(projects(&mapped, false));
    // What is left are pages that the weight shares with its neighbours.
    assert_eq!(mapped.resident(), 2);
    assert!((0..BYTES / size_of::<f32>()).all(|i| unsafe { mapped.weight().add(i).read() } == number(i)));
    assert_eq!(mapped.resident(), pages_of_weight);
    assert!(projects(&mapped, true), "the packed weight is used");
}

/// A page that was written to is nowhere else.
#[test]
fn pages_that_were_written_to_are_kept() {
    if !pages::can_tell() || !packs() {
        return;
    }
    let (file, pages_of_weight) = (file(), BYTES / PAGE + 1);
    let mapped = Mapped::new(Some(&file));
    unsafe { mapped.weight().add(5 * PAGE).write(number(5 * PAGE)) };
    assert!(projects(&mapped, false));
    assert_eq!(mapped.resident(), pages_of_weight);
    assert!(projects(&mapped, true), "the packed weight is used");
    assert_eq!(unsafe { mapped.weight().add(5 * PAGE).read() }, 0.0);
}

#[test]
fn weights_in_other_memory_are_not_packed() {
    let mapped = Mapped::new(None);
    (0..BYTES / size_of::<f32>()).for_each(|i| unsafe { mapped.weight().add(i).write(number(i)) });
    assert!(projects(&mapped, false));
    assert!(!projects(&mapped, true), "the weight is used");
}
