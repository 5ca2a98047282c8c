//! tmp
use bytes::{Buf, Bytes};
use std::collections::VecDeque;
#[derive(Default)]
pub struct Rope {
    pieces: VecDeque<Bytes>,
    len: u64,
}
impl Rope {
    pub fn len(&self) -> u64 {
        self.len
    }
    pub fn push(&mut self, b: Bytes) {
        self.len += b.len() as u64;
        self.pieces.push_back(b);
    }
    pub fn pop(&mut self) -> Option<Bytes> {
        self.pieces.pop_front()
    }
}
impl Buf for Rope {
    fn remaining(&self) -> usize {
        self.len as usize
    }
    fn chunk(&self) -> &[u8] {
        self.pieces.front().map_or(&[], |b| b)
    }
    fn advance(&mut self, mut n: usize) {
        self.len -= n as u64;
        while n > 0 {
            let f = self.pieces.front_mut().expect("x");
            let k = f.len().min(n);
            f.advance(k);
            n -= k;
            if f.is_empty() {
                self.pieces.pop_front();
            }
        }
    }
}
impl hyper::body::Body for Rope {
    type Data = Bytes;
    type Error = std::convert::Infallible;
    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<Bytes>, Self::Error>>> {
        std::task::Poll::Ready(self.pop().map(|b| Ok(hyper::body::Frame::data(b))))
    }
}
