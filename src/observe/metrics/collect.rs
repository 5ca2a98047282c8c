//! Turns what runs and models counted into families, once per scrape.
//!
//! Runs and models come and go, and there may be thousands: they hold plain atomics, and one
//! collector walks over them. The crate's labelled vectors would keep a few hundred bytes for each
//! series, look series up by a hash in which `("ab", "c")` equals `("a", "bc")`, and bring a series
//! back to life when a late call counts into it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use prometheus::core::{Collector, Desc};
use prometheus::proto::{Counter, Gauge, LabelPair, Metric, MetricFamily, MetricType};

use super::table::{Family, Kind};

/// What a scrape walks over.
pub(super) trait Collect: Send + Sync {
    fn collect(&self, into: &mut Series);
}

/// Registers a [`Collect`] as the source of some families.
pub(super) struct Collected<C> {
    descs: Vec<Desc>,
    source: Arc<C>,
}

/// The series gathered so far, by the name of their family.
#[derive(Default)]
pub(super) struct Series(BTreeMap<&'static str, MetricFamily>);

impl<C: Collect> Collected<C> {
    pub(super) fn new(families: &[&Family], source: Arc<C>) -> prometheus::Result<Self> {
        Ok(Self {
            descs: families.iter().map(|family| desc(family)).collect::<Result<_, _>>()?,
            source,
        })
    }
}

impl<C: Collect> Collector for Collected<C> {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut series = Series::default();
        self.source.collect(&mut series);
        series.0.into_values().collect()
    }
}

impl Series {
    /// Adds one sample of a counter or a gauge; the label values are in the table's order.
    pub(super) fn put(&mut self, family: &'static Family, values: &[&str], sample: f64) {
        let mut metric = Metric::default();
        if let Kind::Counter = family.kind {
            let mut counter = Counter::default();
            counter.set_value(sample);
            metric.set_counter(counter);
        } else {
            let mut gauge = Gauge::default();
            gauge.set_value(sample);
            metric.set_gauge(gauge);
        }
        self.put_metric(family, values, metric);
    }

    /// Adds a ready-made metric, such as a histogram's.
    pub(super) fn put_metric(
        &mut self,
        family: &'static Family,
        values: &[&str],
        mut metric: Metric,
    ) {
        debug_assert_eq!(family.labels.len(), values.len(), "{}", family.name);
        metric.set_label(
            family.labels.iter().zip(values).map(|(name, value)| pair(name, value)).collect(),
        );
        self.0.entry(family.name).or_insert_with(|| empty(family)).mut_metric().push(metric);
    }
}

fn pair(name: &str, value: &str) -> LabelPair {
    let mut pair = LabelPair::default();
    pair.set_name(name.to_owned());
    pair.set_value(value.to_owned());
    pair
}

fn empty(family: &Family) -> MetricFamily {
    let mut empty = MetricFamily::default();
    empty.set_name(family.name.to_owned());
    empty.set_help(family.help.to_owned());
    empty.set_field_type(match family.kind {
        Kind::Counter => MetricType::COUNTER,
        Kind::Gauge => MetricType::GAUGE,
        Kind::Histogram(_) => MetricType::HISTOGRAM,
    });
    empty
}

fn desc(family: &Family) -> prometheus::Result<Desc> {
    let labels = family.labels.iter().map(|&label| label.to_owned()).collect();
    Desc::new(family.name.to_owned(), family.help.to_owned(), labels, HashMap::new())
}
