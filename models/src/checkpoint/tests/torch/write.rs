//! Zip files and pickles as torch.save writes them, or worse.

/// A zip file in the making.
#[derive(Default)]
pub(super) struct Zip {
    bytes: Vec<u8>,
    directory: Vec<u8>,
    count: u64,
    /// Whether every number is in its 64-bit field.
    wide: bool,
}

/// An entry's fields that a test spoils.
pub(super) struct Fields {
    pub(super) flags: u16,
    pub(super) method: u16,
    pub(super) stored: u64,
    pub(super) size: u64,
}

impl Zip {
    /// With every number in its 64-bit field.
    pub(super) fn wide() -> Zip {
        Zip { wide: true, ..Zip::default() }
    }

    pub(super) fn add(&mut self, name: &str, data: &[u8]) {
        self.add_with(name, data, |_| {});
    }

    pub(super) fn add_with(&mut self, name: &str, data: &[u8], spoil: impl FnOnce(&mut Fields)) {
        let length = data.len() as u64;
        let mut fields = Fields { flags: 0, method: 0, stored: length, size: length };
        spoil(&mut fields);
        let local = self.bytes.len() as u64;
        self.header(name, &fields);
        self.bytes.extend(data);
        self.list(name, &fields, local);
    }

    /// A local header; PyTorch pads its extra field so that data begin at multiples of 64.
    fn header(&mut self, name: &str, fields: &Fields) {
        let padding = (64 - (self.bytes.len() + 34 + name.len()) % 64) % 64;
        self.bytes.extend(b"PK\x03\x04\x14\0");
        self.bytes.extend([fields.flags, fields.method, 0, 0].map(u16::to_le_bytes).concat());
        self.bytes.extend([0; 12]);
        self.bytes.extend([name.len() as u16, padding as u16 + 4].map(u16::to_le_bytes).concat());
        self.bytes.extend(name.as_bytes());
        self.bytes.extend([b'F', b'B', padding as u8, 0]);
        self.bytes.extend(vec![b'Z'; padding]);
    }

    fn list(&mut self, name: &str, fields: &Fields, local: u64) {
        let numbers = [fields.size, fields.stored, local];
        let mut extra = b"FB\x02\0ZZ".to_vec();
        if self.wide {
            extra.extend([1u16, 24].map(u16::to_le_bytes).concat());
            extra.extend(numbers.map(u64::to_le_bytes).concat());
        }
        let [size, stored, local] = numbers.map(|n| if self.wide { u32::MAX } else { n as u32 });
        let d = &mut self.directory;
        d.extend(b"PK\x01\x02\x14\0\x14\0");
        d.extend([fields.flags, fields.method, 0, 0].map(u16::to_le_bytes).concat());
        d.extend([0, stored, size].map(u32::to_le_bytes).concat());
        d.extend([name.len() as u16, extra.len() as u16, 0, 0, 0].map(u16::to_le_bytes).concat());
        d.extend([0, local].map(u32::to_le_bytes).concat());
        d.extend(name.as_bytes());
        d.extend(extra);
        self.count += 1;
    }

    /// What comes before the directory, as far as the entries' data are known here.
    pub(super) fn front(&self) -> Vec<u8> {
        self.bytes.clone()
    }

    /// Length of the front.
    pub(super) fn length(&self) -> u64 {
        self.bytes.len() as u64
    }

    pub(super) fn finish(self) -> Vec<u8> {
        let start = self.bytes.len() as u64;
        let tail = self.tail(start);
        [self.bytes, tail].concat()
    }

    /// The directory, which begins at `start`, and what follows it.
    pub(super) fn tail(&self, start: u64) -> Vec<u8> {
        let mut tail = self.directory.clone();
        let (end, length) = (start + tail.len() as u64, tail.len() as u64);
        if self.wide {
            tail.extend(b"PK\x06\x06");
            tail.extend(44u64.to_le_bytes());
            tail.extend([45u16, 45].map(u16::to_le_bytes).concat());
            tail.extend([0u32, 0].map(u32::to_le_bytes).concat());
            tail.extend([self.count, self.count, length, start].map(u64::to_le_bytes).concat());
            tail.extend(b"PK\x06\x07\0\0\0\0");
            tail.extend(end.to_le_bytes());
            tail.extend(1u32.to_le_bytes());
        }
        let narrow = |n: u64, all: u64| if self.wide { all } else { n };
        tail.extend(b"PK\x05\x06\0\0\0\0");
        tail.extend([narrow(self.count, 0xffff) as u16; 2].map(u16::to_le_bytes).concat());
        tail.extend(
            [narrow(length, 0xffff_ffff), narrow(start, 0xffff_ffff)].map(|n| (n as u32).to_le_bytes()).concat(),
        );
        tail.extend([0, 0]);
        tail
    }

    /// A header for `size` bytes that a test puts into the file itself, from `at` on; returns what is before them.
    pub(super) fn add_sparse(&mut self, name: &str, size: u64, at: u64) -> Vec<u8> {
        let fields = Fields { flags: 0, method: 0, stored: size, size };
        let earlier = self.bytes.len();
        self.header(name, &fields);
        self.list(name, &fields, at);
        self.bytes.split_off(earlier)
    }
}

pub(super) fn text(text: &str) -> Vec<u8> {
    [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
}

pub(super) fn int(n: i64) -> Vec<u8> {
    match u8::try_from(n) {
        Ok(n) => vec![b'K', n],
        Err(_) => [&[0x8a, 8], &n.to_le_bytes()[..]].concat(),
    }
}

pub(super) fn tuple(items: &[Vec<u8>]) -> Vec<u8> {
    [b"(", &items.concat()[..], b"t"].concat()
}

pub(super) fn ints(items: &[i64]) -> Vec<u8> {
    tuple(&items.iter().map(|&n| int(n)).collect::<Vec<_>>())
}

pub(super) fn global(module: &str, name: &str) -> Vec<u8> {
    format!("c{module}\n{name}\n").into_bytes()
}

pub(super) fn call(module: &str, name: &str, arguments: &[Vec<u8>]) -> Vec<u8> {
    [global(module, name), tuple(arguments), b"R".to_vec()].concat()
}

pub(super) fn dict(pairs: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let pairs: Vec<u8> = pairs.iter().flat_map(|(key, value)| [text(key), value.clone()].concat()).collect();
    [b"}(", &pairs[..], b"u"].concat()
}

pub(super) fn storage(class: &str, key: &str, elements: i64) -> Vec<u8> {
    let id = [text("storage"), global("torch", class), text(key), text("cpu"), int(elements)];
    [tuple(&id), b"Q".to_vec()].concat()
}

pub(super) fn tensor(storage: Vec<u8>, offset: i64, shape: &[i64], strides: &[i64]) -> Vec<u8> {
    let hooks = call("collections", "OrderedDict", &[]);
    let arguments = [storage, int(offset), ints(shape), ints(strides), vec![0x89], hooks];
    call("torch._utils", "_rebuild_tensor_v2", &arguments)
}

/// A tensor of `n` floats, which are storage "0".
pub(super) fn floats(n: i64) -> Vec<u8> {
    tensor(storage("FloatStorage", "0", n), 0, &[n], &[1])
}

pub(super) fn program(value: Vec<u8>) -> Vec<u8> {
    [&[0x80, 2], &value[..], b"."].concat()
}

/// The entries of a file whose storages, "0", "1" and so on, are `storages`.
pub(super) fn entries(value: Vec<u8>, storages: &[&[u8]]) -> Zip {
    let mut zip = Zip::default();
    zip.add("archive/data.pkl", &program(value));
    zip.add("archive/byteorder", b"little");
    for (i, bytes) in storages.iter().enumerate() {
        zip.add(&format!("archive/data/{i}"), bytes);
    }
    zip.add("archive/version", b"3\n");
    zip
}

/// A file of torch.save.
pub(super) fn saved(value: Vec<u8>, storages: &[&[u8]]) -> Vec<u8> {
    entries(value, storages).finish()
}

/// Floats as bytes.
pub(super) fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}
