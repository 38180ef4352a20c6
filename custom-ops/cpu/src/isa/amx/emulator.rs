//! Performs the tile instructions that this crate uses on processors without AMX, for tests.
//!
//! An instruction that the processor does not know raises SIGILL. The handler decodes it, performs it on tiles that belong to the
//! thread, and continues after it. On processors with AMX nothing is raised. Instructions are defined in Intel's Software
//! Developer's Manual, volume 2; the tiles' configuration in volume 1, chapter 18.

mod tests;

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::OnceLock;

const TILES: usize = 8;
const ROWS: usize = 16;
const ROW_BYTES: usize = 64;

/// While it exists, AMX is found on this thread, which may pass what it found on to others.
pub(crate) struct Emulated(PhantomData<*const ()>);

thread_local! {
    static EMULATED: Cell<usize> = const { Cell::new(0) };
    static TILE_REGISTERS: RefCell<Registers> = const { RefCell::new(Registers::NEW) };
}

/// What was called for SIGILL before.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Installs the handler, once for the process, and lets AMX be found on this thread.
pub(crate) fn emulate() -> Emulated {
    // A processor with AMX runs instructions itself once the system permits it.
    super::is_there();
    PREVIOUS.get_or_init(|| {
        // SAFETY: all fields of both structures may be 0; the handler has the signature that SA_SIGINFO requires.
        unsafe {
            let mut action = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
            let mut previous = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
            let handler: extern "C" fn(_, _, _) = handle;
            action.sa_sigaction = handler as libc::sighandler_t;
            action.sa_flags = libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(libc::SIGILL, &action, &mut previous), 0);
            previous
        }
    });
    EMULATED.set(EMULATED.get() + 1);
    Emulated(PhantomData)
}

/// Whether AMX is emulated for this thread.
pub(super) fn is_on() -> bool {
    EMULATED.get() > 0
}

impl Drop for Emulated {
    fn drop(&mut self) {
        EMULATED.set(EMULATED.get() - 1);
    }
}

extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    const ORDER: [libc::c_int; 16] = [
        libc::REG_RAX,
        libc::REG_RCX,
        libc::REG_RDX,
        libc::REG_RBX,
        libc::REG_RSP,
        libc::REG_RBP,
        libc::REG_RSI,
        libc::REG_RDI,
        libc::REG_R8,
        libc::REG_R9,
        libc::REG_R10,
        libc::REG_R11,
        libc::REG_R12,
        libc::REG_R13,
        libc::REG_R14,
        libc::REG_R15,
    ];
    // SAFETY: the system passes the context of the interrupted thread, which it restores afterwards.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let general = ORDER.map(|register| registers[register as usize].cast_unsigned());
    let start = registers[libc::REG_RIP as usize].cast_unsigned();
    // SAFETY: the processor has just read the instruction there, and its memory operand is the program's responsibility.
    let done = unsafe {
        decode(start as *const u8, &general).and_then(|(instruction, end)| {
            TILE_REGISTERS.with(|registers| registers.borrow_mut().perform(instruction)).then_some(end)
        })
    };
    if let Some(end) = done {
        registers[libc::REG_RIP as usize] = (end as u64).cast_signed();
    } else {
        // SAFETY: what the system passed.
        unsafe { forward(signal, info, context) }
    }
}

/// Does what would have been done without the emulator.
///
/// # Safety
/// The arguments are those of the handler.
unsafe fn forward(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let handler = PREVIOUS.get().map_or(libc::SIG_DFL, |previous| previous.sa_sigaction);
    let takes_info = PREVIOUS.get().is_some_and(|previous| previous.sa_flags & libc::SA_SIGINFO != 0);
    // SAFETY: a handler that was installed has the signature that its flags say; the caller's contract.
    unsafe {
        if matches!(handler, libc::SIG_DFL | libc::SIG_IGN) {
            // The instruction is tried again, and then ends the process.
            libc::signal(signal, libc::SIG_DFL);
        } else if takes_info {
            let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                std::mem::transmute(handler);
            handler(signal, info, context);
        } else {
            let handler: extern "C" fn(libc::c_int) = std::mem::transmute(handler);
            handler(signal);
        }
    }
}

/// Where the rows of a tile are in memory: row i at `start + i * stride`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    start: u64,
    stride: u64,
}

/// A multiplication of tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Product {
    Bf16,
    /// Of signed bytes.
    Bytes,
}

/// The instructions that are emulated; numbers are those of tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Instruction {
    Configure(*const u8),
    Release,
    Zero(usize),
    Load(usize, Place),
    Store(Place, usize),
    Multiply { product: Product, sum: usize, left: usize, right: usize },
}

/// Reads an instruction's bytes.
struct Reader(*const u8);

impl Reader {
    /// # Safety
    /// The instruction has another byte.
    unsafe fn byte(&mut self) -> u8 {
        // SAFETY: the caller's contract.
        unsafe {
            let byte = *self.0;
            self.0 = self.0.add(1);
            byte
        }
    }

    /// A displacement of 1 or 4 bytes, sign-extended.
    ///
    /// # Safety
    /// The instruction has it.
    unsafe fn displacement(&mut self, bytes: usize) -> u64 {
        // SAFETY: the caller's contract.
        let value = unsafe {
            match bytes {
                1 => i64::from(self.byte().cast_signed()),
                _ => i64::from(i32::from_le_bytes(std::array::from_fn(|_| self.byte()))),
            }
        };
        value.cast_unsigned()
    }
}

/// The tile instruction at `at` and the address after it; `None` if it is another one. `general` holds the registers in the order
/// of their numbers.
///
/// # Safety
/// There is an instruction.
unsafe fn decode(at: *const u8, general: &[u64; 16]) -> Option<(Instruction, *const u8)> {
    const NONE: u8 = 0;
    const PF3: u8 = 2;
    const PF2: u8 = 3;
    let mut reader = Reader(at);
    // SAFETY: bytes are read only as far as those before them say that the instruction goes on.
    unsafe {
        // Three-byte VEX; register extensions are stored inverted.
        if reader.byte() != 0xc4 {
            return None;
        }
        let (first, second) = (!reader.byte(), reader.byte());
        let extended = |bit: u8| usize::from(first >> bit & 1) << 3;
        let (map, wide, length, prefix) = (!first & 31, second >> 7, second >> 2 & 1, second & 3);
        let right = usize::from(!second >> 3 & 15);
        if map != 2 || wide != 0 || length != 0 {
            return None;
        }
        let (opcode, operands) = (reader.byte(), reader.byte());
        let tile = usize::from(operands >> 3 & 7) | extended(7);
        let other = usize::from(operands & 7) | extended(5);
        if operands >> 6 == 3 {
            let instruction = match (opcode, prefix) {
                (0x49, NONE) if operands == 0xc0 => Instruction::Release,
                (0x49, PF2) if other == 0 => Instruction::Zero(tile),
                (0x5c, PF3) => Instruction::Multiply { product: Product::Bf16, sum: tile, left: other, right },
                (0x5e, PF2) => Instruction::Multiply { product: Product::Bytes, sum: tile, left: other, right },
                _ => return None,
            };
            return Some((instruction, reader.0));
        }
        if !matches!((opcode, prefix), (0x49, NONE) | (0x4b, PF2 | PF3)) || (opcode == 0x49 && tile != 0) {
            return None;
        }
        let mode = operands >> 6;
        let (mut start, mut stride, mut relative) = (0, 0, false);
        let mut displacement = [0, 1, 4][usize::from(mode)];
        let scaled = operands & 7 == 4;
        if scaled {
            let scale = reader.byte();
            let (index, base) = (usize::from(scale >> 3 & 7) | extended(6), usize::from(scale & 7) | extended(5));
            if index != 4 {
                stride = general[index] << (scale >> 6);
            }
            match scale & 7 == 5 && mode == 0 {
                true => displacement = 4,
                false => start = general[base],
            }
        } else if operands & 7 == 5 && mode == 0 {
            (displacement, relative) = (4, true);
        } else {
            start = general[other];
        }
        if displacement > 0 {
            start = start.wrapping_add(reader.displacement(displacement));
        }
        if relative {
            start = start.wrapping_add(reader.0 as u64);
        }
        let place = Place { start, stride };
        let instruction = match (opcode, prefix) {
            (0x49, _) => Instruction::Configure(start.wrapping_add(stride) as *const u8),
            (_, _) if !scaled => return None,
            (_, PF2) => Instruction::Load(tile, place),
            _ => Instruction::Store(place, tile),
        };
        Some((instruction, reader.0))
    }
}

/// A tile, and how much of it is configured.
#[derive(Debug, Clone, Copy)]
struct Tile {
    rows: usize,
    /// Bytes of a row.
    columns: usize,
    data: [[u8; ROW_BYTES]; ROWS],
}

impl Tile {
    const ZERO: [[u8; ROW_BYTES]; ROWS] = [[0; ROW_BYTES]; ROWS];

    /// Word `i` of a row.
    fn word(&self, row: usize, i: usize) -> [u8; 4] {
        std::array::from_fn(|byte| self.data[row][4 * i + byte])
    }

    fn set_word(&mut self, row: usize, i: usize, word: [u8; 4]) {
        self.data[row][4 * i..4 * i + 4].copy_from_slice(&word);
    }
}

/// The tile registers of a thread.
struct Registers {
    tiles: [Tile; TILES],
}

impl Registers {
    /// Not configured: no tile has rows.
    const NEW: Registers = Registers { tiles: [Tile { rows: 0, columns: 0, data: Tile::ZERO }; TILES] };

    /// Performs an instruction; returns false, having changed nothing, where the processor would raise an exception.
    ///
    /// # Safety
    /// The instruction's memory is valid.
    unsafe fn perform(&mut self, instruction: Instruction) -> bool {
        match instruction {
            Instruction::Configure(from) => {
                // SAFETY: the caller's contract: a configuration has 64 bytes.
                let bytes = unsafe { from.cast::<[u8; 64]>().read() };
                return self.configure(&bytes);
            }
            Instruction::Release => *self = Registers::NEW,
            Instruction::Zero(tile) => match self.tiles.get_mut(tile).filter(|tile| tile.rows > 0) {
                Some(tile) => tile.data = Tile::ZERO,
                None => return false,
            },
            Instruction::Load(tile, place) => match self.tiles.get_mut(tile).filter(|tile| tile.rows > 0) {
                Some(tile) => {
                    tile.data = Tile::ZERO;
                    for row in 0..tile.rows {
                        let from = place.start.wrapping_add(place.stride.wrapping_mul(row as u64)) as *const u8;
                        // SAFETY: the caller's contract.
                        unsafe { std::ptr::copy_nonoverlapping(from, tile.data[row].as_mut_ptr(), tile.columns) };
                    }
                }
                None => return false,
            },
            Instruction::Store(place, tile) => match self.tiles.get(tile).filter(|tile| tile.rows > 0) {
                Some(tile) => {
                    for row in 0..tile.rows {
                        let to = place.start.wrapping_add(place.stride.wrapping_mul(row as u64)) as *mut u8;
                        // SAFETY: the caller's contract.
                        unsafe { std::ptr::copy_nonoverlapping(tile.data[row].as_ptr(), to, tile.columns) };
                    }
                }
                None => return false,
            },
            Instruction::Multiply { product, sum, left, right } => {
                if sum == left || sum == right || left == right {
                    return false;
                }
                let [Some(&c), Some(a), Some(b)] = [sum, left, right].map(|tile| self.tiles.get(tile)) else {
                    return false;
                };
                let words = [c, *a, *b].iter().all(|tile| tile.rows > 0 && tile.columns.is_multiple_of(4));
                if !words || c.rows != a.rows || c.columns != b.columns || a.columns / 4 != b.rows {
                    return false;
                }
                let mut c = c;
                match product {
                    Product::Bf16 => multiply_bf16_quickly(&mut c, a, b),
                    Product::Bytes => multiply_bytes(&mut c, a, b),
                }
                self.tiles[sum] = c;
            }
        }
        true
    }

    fn configure(&mut self, bytes: &[u8; 64]) -> bool {
        let mut registers = Registers::NEW;
        if bytes[0] != 0 {
            for (tile, register) in registers.tiles.iter_mut().enumerate() {
                register.columns = usize::from(u16::from_le_bytes([bytes[16 + 2 * tile], bytes[17 + 2 * tile]]));
                register.rows = usize::from(bytes[48 + tile]);
            }
        }
        let fits =
            |tile: &Tile| tile.rows <= ROWS && tile.columns <= ROW_BYTES && (tile.rows == 0) == (tile.columns == 0);
        let reserved = bytes[2..16].iter().chain(&bytes[32..48]).chain(&bytes[56..]);
        if bytes[0] > 1 || !registers.tiles.iter().all(fits) || reserved.into_iter().any(|&byte| byte != 0) {
            return false;
        }
        *self = registers;
        true
    }
}

fn multiply_bytes(c: &mut Tile, a: &Tile, b: &Tile) {
    for m in 0..c.rows {
        for n in 0..c.columns / 4 {
            let mut sum = i32::from_le_bytes(c.word(m, n));
            for k in 0..b.rows {
                for (x, y) in a.word(m, k).into_iter().zip(b.word(k, n)) {
                    sum = sum.wrapping_add(i32::from(x.cast_signed()) * i32::from(y.cast_signed()));
                }
            }
            c.set_word(m, n, sum.to_le_bytes());
        }
    }
}

/// Numbers are rounded to nearest even, and 0 where they are denormal. Products of even and of odd index are summed apart,
/// each by fused multiply-adds that start from 0; then both sums are added, and the result to the tile.
///
/// (The processor flushes before it rounds: it differs for results that round up to the least normal number.)
#[inline(always)]
fn multiply_bf16(c: &mut Tile, a: &Tile, b: &Tile) {
    let flushed = |x: f32| if x.is_subnormal() { 0f32.copysign(x) } else { x };
    let number = |half: [u8; 2]| flushed(f32::from_bits(u32::from(u16::from_le_bytes(half)) << 16));
    let halves = |[a, b, c, d]: [u8; 4]| [number([a, b]), number([c, d])];
    for m in 0..c.rows {
        let mut parts = [[0f32; ROW_BYTES / 4]; 2];
        for k in 0..b.rows {
            let x = halves(a.word(m, k));
            for n in 0..c.columns / 4 {
                let y = halves(b.word(k, n));
                for half in 0..2 {
                    parts[half][n] = flushed(x[half].mul_add(y[half], parts[half][n]));
                }
            }
        }
        for n in 0..c.columns / 4 {
            let sum = flushed(f32::from_le_bytes(c.word(m, n))) + flushed(parts[0][n] + parts[1][n]);
            c.set_word(m, n, flushed(sum).to_le_bytes());
        }
    }
}

/// As [`multiply_bf16`], without a call for each multiply-add where the processor has them.
fn multiply_bf16_quickly(c: &mut Tile, a: &Tile, b: &Tile) {
    #[target_feature(enable = "fma")]
    fn enabled(c: &mut Tile, a: &Tile, b: &Tile) {
        multiply_bf16(c, a, b);
    }
    if !is_x86_feature_detected!("fma") {
        return multiply_bf16(c, a, b);
    }
    // SAFETY: the processor has the feature.
    unsafe { enabled(c, a, b) }
}
