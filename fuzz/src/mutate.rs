//! Makes inputs from samples by small cuts, copies and changes, as libFuzzer's mutators do, without its feedback.

/// Texts that parsers of this package treat specially. They are inserted whole, because random bytes would take too
/// long to spell them.
const TOKENS: &[&[u8]] = &[
    b"data: ",
    b"data:",
    b"event: ",
    b"\n\n",
    b"\r\n",
    b"\r",
    b"\n",
    b":",
    b"\xef\xbb\xbf",
    b"[DONE]",
    b"{",
    b"}",
    b"[",
    b"]",
    b"\"",
    b",",
    b"\\u0000",
    b"\\ud800",
    b"null",
    b"true",
    b"-1",
    b"0",
    b"1e309",
    b"18446744073709551616",
    b"\"usage\":",
    b"\"model\":",
    b"\"stream\":true",
    b"\"max_tokens\":",
    b"\"messages\":[",
    b"\xff",
    b"\0",
    b"..",
    b"%2e",
];

/// A longer input only makes the target slower, because a target may split it at every byte.
const LONGEST: usize = 4 << 10;

pub struct SampleMutator {
    samples: Vec<Vec<u8>>,
    input: Vec<u8>,
    state: u64,
}

impl SampleMutator {
    pub fn new(mut samples: Vec<Vec<u8>>, seed: u64) -> Self {
        samples.push(vec![]);
        Self { samples, input: vec![], state: seed | 1 }
    }

    /// Returns the next input: a sample with a few changes or, one time in sixteen, noise.
    pub fn next(&mut self) -> &[u8] {
        self.input.clear();
        if self.below(16) == 0 {
            let length = self.below(256);
            for _ in 0..length {
                let byte = self.byte();
                self.input.push(byte);
            }
            return &self.input;
        }
        let sample = self.below(self.samples.len());
        self.input.extend_from_slice(&self.samples[sample]);
        for _ in 0..=self.below(6) {
            self.change();
        }
        self.input.truncate(LONGEST);
        &self.input
    }

    fn change(&mut self) {
        let (from, to) = self.range();
        match self.below(7) {
            0 => {
                let token = self.below(TOKENS.len());
                self.insert(from, TOKENS[token]);
            }
            1 => drop(self.input.drain(from..to)),
            2 => self.input.truncate(from),
            3 => {
                let copy = self.input[from..to].to_vec();
                let at = self.below(self.input.len() + 1);
                self.insert(at, &copy);
            }
            4 => {
                let other = self.below(self.samples.len());
                let cut = self.below(self.samples[other].len() + 1);
                self.input.truncate(from);
                self.input.extend_from_slice(&self.samples[other][cut..]);
            }
            5 if from < self.input.len() => self.input[from] ^= 1 << self.below(8),
            _ if from < self.input.len() => self.input[from] = self.byte(),
            _ => (),
        }
    }

    fn insert(&mut self, at: usize, bytes: &[u8]) {
        self.input.splice(at..at, bytes.iter().copied());
    }

    /// A range of the input, more often short than long.
    fn range(&mut self) -> (usize, usize) {
        let from = self.below(self.input.len() + 1);
        let most = 1 << self.below(10);
        (from, self.input.len().min(from + self.below(most) + 1))
    }

    fn byte(&mut self) -> u8 {
        self.random().to_le_bytes()[4]
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.random() >> 33).expect("31 bits") % bound
    }

    /// xorshift64*: good enough here, without a dependency.
    fn random(&mut self) -> u64 {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        self.state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}
