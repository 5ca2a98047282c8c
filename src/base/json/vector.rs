//! Finds the bytes of a string that need a look, sixteen at a time where the processor can.
//!
//! Each search has two forms with one answer: with SSE2, which every x86-64 processor has, and byte by
//! byte, for what is shorter than a vector and for other processors. A test holds one against the other.

/// Returns the offset of the first byte that is not plain text: a quote, a backslash, a control character, or not
/// ASCII.
#[inline]
pub(super) fn find_stop(data: &[u8]) -> Option<usize> {
    #[cfg(target_arch = "x86_64")]
    if data.len() >= BLOCK_BYTES {
        return search_blocks(data, stops);
    }
    data.iter().position(|byte| is_stop_byte(*byte))
}

/// One bit for each byte that is no plain text, the first byte's the lowest.
#[inline]
pub(super) fn stop_mask(bytes: &[u8; MASKED]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    return mask_of(bytes, stops);
    #[cfg(not(target_arch = "x86_64"))]
    bytes.iter().rev().fold(0, |mask, byte| mask << 1 | u64::from(is_stop_byte(*byte)))
}

/// One bit for each byte that is a quote or a backslash, the first byte's the lowest.
#[inline]
pub(super) fn quote_mask(bytes: &[u8; MASKED]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    return mask_of(bytes, quotes);
    #[cfg(not(target_arch = "x86_64"))]
    bytes.iter().rev().fold(0, |mask, byte| mask << 1 | u64::from(is_quote_or_backslash(*byte)))
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn mask_of(bytes: &[u8; MASKED], search: impl Fn(&[u8; BLOCK_BYTES]) -> u32) -> u64 {
    let (blocks, _) = bytes.as_chunks();
    blocks.iter().rev().fold(0, |mask, block| mask << BLOCK_BYTES | u64::from(search(block)))
}

/// Returns the offset of the first quote or backslash.
#[inline]
pub(super) fn find_quote(data: &[u8]) -> Option<usize> {
    #[cfg(target_arch = "x86_64")]
    if data.len() >= BLOCK_BYTES {
        return search_blocks(data, quotes);
    }
    data.iter().position(|byte| is_quote_or_backslash(*byte))
}

#[inline]
fn is_stop_byte(byte: u8) -> bool {
    matches!(byte, 0..b' ' | b'"' | b'\\' | 0x80..)
}

#[inline]
fn is_quote_or_backslash(byte: u8) -> bool {
    matches!(byte, b'"' | b'\\')
}

/// Searches block by block, where there is one at least; the last overlaps the one before it.
#[cfg(target_arch = "x86_64")]
#[inline]
fn search_blocks(data: &[u8], search: impl Fn(&[u8; BLOCK_BYTES]) -> u32) -> Option<usize> {
    let last = data.last_chunk()?;
    let (blocks, _) = data.as_chunks();
    for (index, block) in blocks.iter().enumerate() {
        let found = search(block);
        if found != 0 {
            return Some(index * BLOCK_BYTES + found.trailing_zeros() as usize);
        }
    }
    let found = search(last);
    (found != 0).then(|| data.len() - BLOCK_BYTES + found.trailing_zeros() as usize)
}

/// One bit for each byte that is a stop.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "the compiler asks for it wherever a processor's extension is used")]
#[inline]
fn stops(block: &[u8; BLOCK_BYTES]) -> u32 {
    // SAFETY: SSE2 is a part of x86-64.
    unsafe { sse2::stops(block) }
}

/// One bit for each byte that is a quote or a backslash.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "the compiler asks for it wherever a processor's extension is used")]
#[inline]
fn quotes(block: &[u8; BLOCK_BYTES]) -> u32 {
    // SAFETY: SSE2 is a part of x86-64.
    unsafe { sse2::quotes(block) }
}

#[cfg(target_arch = "x86_64")]
mod sse2 {
    use std::arch::x86_64::{
        __m128i, _mm_cmpeq_epi8, _mm_cmpgt_epi8, _mm_movemask_epi8, _mm_or_si128, _mm_set_epi64x,
        _mm_set1_epi8,
    };

    use super::BLOCK_BYTES;

    #[target_feature(enable = "sse2")]
    #[inline]
    pub(super) fn stops(block: &[u8; BLOCK_BYTES]) -> u32 {
        let bytes = load_block(block);
        // Compared with a sign: what is not ASCII is below the blank, as controls are.
        let low = _mm_cmpgt_epi8(broadcast_byte(b' '), bytes);
        lane_mask(_mm_or_si128(low, quote_lanes(bytes)))
    }

    #[target_feature(enable = "sse2")]
    #[inline]
    pub(super) fn quotes(block: &[u8; BLOCK_BYTES]) -> u32 {
        lane_mask(quote_lanes(load_block(block)))
    }

    #[target_feature(enable = "sse2")]
    #[inline]
    fn quote_lanes(bytes: __m128i) -> __m128i {
        _mm_or_si128(
            _mm_cmpeq_epi8(bytes, broadcast_byte(b'"')),
            _mm_cmpeq_epi8(bytes, broadcast_byte(b'\\')),
        )
    }

    #[target_feature(enable = "sse2")]
    #[inline]
    fn broadcast_byte(byte: u8) -> __m128i {
        _mm_set1_epi8(byte.cast_signed())
    }

    #[target_feature(enable = "sse2")]
    #[inline]
    fn lane_mask(bytes: __m128i) -> u32 {
        _mm_movemask_epi8(bytes).cast_unsigned()
    }

    /// Two words that the compiler loads as one vector.
    #[target_feature(enable = "sse2")]
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "the other half is the other word")]
    fn load_block(block: &[u8; BLOCK_BYTES]) -> __m128i {
        let block = u128::from_le_bytes(*block);
        let word = |word: u128| (word as u64).cast_signed();
        _mm_set_epi64x(word(block >> 64), word(block))
    }
}

/// Bytes that are looked at together where many of them need a look.
pub(super) const MASKED: usize = 64;

/// Bytes that are looked at before so many are: most strings are short.
pub(super) const SHORT: usize = 16;

/// Bytes of a vector.
#[cfg(target_arch = "x86_64")]
const BLOCK_BYTES: usize = 16;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{
        find_quote, find_stop, is_quote_or_backslash, is_stop_byte, quote_mask, stop_mask,
    };

    proptest! {
        #[test]
        fn vectors_find_what_a_search_byte_by_byte_finds(
            mut data in prop::collection::vec(b' '..=b'~', 0..200),
            odd in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            from in 0_usize..20,
        ) {
            data.iter_mut().filter(|byte| is_stop_byte(**byte)).for_each(|byte| *byte = b'x');
            for (at, byte) in odd {
                if !data.is_empty() {
                    let at = at.index(data.len());
                    data[at] = byte;
                }
            }
            // Unaligned as well.
            let data = &data[from.min(data.len())..];
            prop_assert_eq!(find_stop(data), data.iter().position(|byte| is_stop_byte(*byte)));
            prop_assert_eq!(find_quote(data), data.iter().position(|byte| is_quote_or_backslash(*byte)));
            if let Some(block) = data.first_chunk() {
                let mask = stop_mask(block);
                for (at, byte) in block.iter().enumerate() {
                    prop_assert_eq!(mask >> at & 1 == 1, is_stop_byte(*byte));
                    prop_assert_eq!(quote_mask(block) >> at & 1 == 1, is_quote_or_backslash(*byte));
                }
            }
        }
    }
}
